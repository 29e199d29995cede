# SPDX-License-Identifier: Apache-2.0
"""The hub between the engine's thread and the event loop: what is urgent, what is remembered, and for how long."""

from __future__ import annotations

import asyncio

import pytest

from cedar.engine.request import FinishReason
from cedar.engine.updates import SequenceUpdate
from cedar.service import hub as hub_module
from cedar.service.hub import TokenStream, UpdateHub


def ended(handle: str) -> SequenceUpdate:
    return SequenceUpdate(handle, 3, finish_reason=FinishReason.CANCELLED)


def test_first_or_last_token_waits_for_others_to_share_its_message() -> None:
    async def urgency() -> list[bool]:
        hub, stream, seen = UpdateHub(asyncio.get_running_loop()), TokenStream(), []
        hub.publish([SequenceUpdate("h", 3, ready=True)])
        assert hub.attach("h", stream)
        updates = [SequenceUpdate("h", 3, token_ids=[7], num_output_tokens=count) for count in (1, 2)]
        for update in (*updates, ended("h")):
            hub.publish([update])
            await asyncio.wait_for(stream.wake.wait(), 5)
            seen.append(stream.urgent.is_set())
            hub.take(stream)
        return seen

    assert asyncio.run(urgency()) == [True, False, True]


def test_sequences_that_nobody_asks_for_are_remembered_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "MAX_ENDED", 3)

    async def answers() -> list[str]:
        hub, stream = UpdateHub(asyncio.get_running_loop()), TokenStream()
        hub.publish([ended(f"h{number}") for number in range(5)])
        assert hub.num_live == 0
        for number in range(5):
            assert not hub.attach(f"h{number}", stream)
        return [message.finish_reason for message in hub.take(stream)]

    assert asyncio.run(answers()) == ["error", "error", "cancelled", "cancelled", "cancelled"]


def test_an_end_before_its_admission_was_told_is_lost() -> None:
    async def record_of_the_ended() -> None:
        hub = UpdateHub(asyncio.get_running_loop())
        hub.publish([ended("h")])
        record = hub.record("h", 3)
        assert record.cancelled
        assert record.progress.num_input_tokens == 3
        assert hub.num_live == 0
        hub.forget("h")
        stream = TokenStream()
        hub.attach("h", stream)
        assert [message.error_code for message in hub.take(stream)] == ["UNAVAILABLE"]

    asyncio.run(record_of_the_ended())


def test_a_late_refusal_replaces_the_last_message() -> None:
    """An abort of a sequence that has just ended must not hide how it ended."""

    async def last_messages() -> list[str]:
        hub, stream = UpdateHub(asyncio.get_running_loop()), TokenStream()
        hub.publish([SequenceUpdate("h", 3, ready=True)])
        hub.attach("h", stream)
        hub.publish([SequenceUpdate("h", 3, token_ids=[7], num_output_tokens=1, finish_reason=FinishReason.LENGTH)])
        hub.answer_unknown("h", stream)
        return [message.finish_reason for message in hub.take(stream)]

    assert asyncio.run(last_messages()) == ["length"]
