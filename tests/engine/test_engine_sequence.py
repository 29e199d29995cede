# SPDX-License-Identifier: Apache-2.0
"""States of a sequence: every transition that exists, and none that does not."""

from __future__ import annotations

import pytest
from fake_runner import FakeMemory, request

from cedar.engine.request import DecoderReplay, EncoderReplay, FinishReason
from cedar.engine.sequence import Sequence, SequenceState

LEASE = 100


def sequence(prompt: int = 3) -> Sequence:
    return Sequence(
        "h",
        1,
        request("k", prompt),
        max_tokens=4,
        encoder_replay=EncoderReplay.BOUNDED,
        decoder_replay=DecoderReplay.BOUNDED,
        page_tokens=64,
        end_ids=frozenset(),
        arrival_ns=5,
        deadline_ns=None,
    )


def in_state(state: SequenceState) -> Sequence:
    seq = sequence()
    if state is SequenceState.WAITING:
        return seq
    memory = FakeMemory(DecoderReplay.BOUNDED)
    seq.start(memory)
    if state is SequenceState.PREEMPTED:
        seq.preempt()
    elif state is SequenceState.FINISHED:
        seq.finish(FinishReason.STOP)
    elif state is not SequenceState.ENCODING:
        memory.num_computed = seq.num_tokens
        seq.encoded(10, LEASE)
        if state is SequenceState.DECODING:
            seq.attach()
    assert seq.state is state
    return seq


def encode(seq: Sequence) -> None:
    if seq.memory is not None:
        seq.memory.num_computed = seq.num_tokens
    seq.encoded(10, LEASE)


TRANSITIONS = {
    "start": (lambda seq: seq.start(FakeMemory(DecoderReplay.OFF)), {"WAITING": "ENCODING", "PREEMPTED": "ENCODING"}),
    "encoded": (encode, {"ENCODING": "ENCODED"}),
    "append": (lambda seq: seq.append(7, 20), {"DECODING": "DECODING"}),
    "preempt": (lambda seq: seq.preempt(), {"ENCODING": "PREEMPTED", "ENCODED": "PREEMPTED", "DECODING": "PREEMPTED"}),
    "finish": (lambda seq: seq.finish(FinishReason.STOP), {s.name: "FINISHED" for s in SequenceState if s.name != "FINISHED"}),
}


@pytest.mark.parametrize("name", TRANSITIONS)
@pytest.mark.parametrize("state", list(SequenceState))
def test_only_the_listed_transitions_exist(name: str, state: SequenceState) -> None:
    act, allowed = TRANSITIONS[name]
    seq = in_state(state)
    if state.name in allowed:
        act(seq)
        assert seq.state.name == allowed[state.name]
    else:
        with pytest.raises(AssertionError):
            act(seq)


@pytest.mark.parametrize("state", [SequenceState.ENCODING, SequenceState.ENCODED, SequenceState.DECODING])
def test_memory_leaves_the_sequence_exactly_once(state: SequenceState) -> None:
    for leave in (lambda seq: seq.preempt(), lambda seq: seq.finish(FinishReason.CANCELLED)):
        seq = in_state(state)
        memory = seq.memory
        assert leave(seq) is memory is not None
        assert not seq.has_memory


@pytest.mark.parametrize("state", [SequenceState.WAITING, SequenceState.PREEMPTED])
def test_finishing_without_memory_returns_none(state: SequenceState) -> None:
    assert in_state(state).finish(FinishReason.CANCELLED) is None


def test_attach_before_the_prompt_is_encoded_decodes_as_soon_as_it_is() -> None:
    seq = in_state(SequenceState.ENCODING)
    seq.attach()
    assert seq.state is SequenceState.ENCODING
    encode(seq)
    assert seq.state is SequenceState.DECODING
    assert seq.lease_ns is None


def test_preemption_does_not_extend_the_lease() -> None:
    seq = in_state(SequenceState.ENCODED)
    assert seq.lease_ns == 10 + LEASE
    seq.preempt()
    seq.start(FakeMemory(DecoderReplay.BOUNDED))
    seq.memory.num_computed = seq.num_tokens
    seq.encoded(50, LEASE)
    assert seq.lease_ns == 10 + LEASE


def test_a_half_encoded_prompt_cannot_become_encoded() -> None:
    seq = in_state(SequenceState.ENCODING)
    seq.memory.num_computed = seq.num_tokens - 1
    with pytest.raises(AssertionError, match="1 tokens are not encoded"):
        seq.encoded(10, LEASE)
