# SPDX-License-Identifier: Apache-2.0
"""What runs in the next step: continuous batching under a token budget.

A step takes, in this order:

1. **decodes**, one token each. When prompts wait, decodes leave them a quarter of the budget; then the decodes that ran
   longest ago go first.
2. **tails** (first decoder passes), charged with the rows they keep. One may exceed the budget, or it would never run.
3. **prompt chunks.** Short prompts (at most a quarter of the budget) first. The rest is *bulk*: half of the room goes to
   the first in rank, so that no long prompt starves; the other half to the one that is nearest to its end, so that nothing waits
   for a whole longer prompt.

Bulk makes a step long, and whoever is about to get a first token would wait for it. So while a short prompt is between arrival
and first token, bulk stands back, for at most as long as its last chunk took: a request of a few tokens is delayed by the
chunk that was running when it came and by no other. When bulk's turn has come, half of what decodes leave is its own, however
many short prompts there are, so it always keeps at least about a quarter of the machine.

Memory: a prompt gets all of its pages when it is opened, so only decodes can run out. Then the last in rank is preempted (its
tokens are encoded again later). A sequence only ever takes memory from those after it in rank, and the first in rank always
advances; therefore everything ends. Nobody overtakes the head of the waiting queue, therefore nobody starves there.

Prompts that come together with one new beginning encode it once: a long prompt of which nothing is encoded gets no rows in a step
that encodes its beginning for another, and looks for pages again when its turn comes. Its rows go to that other one, so it does
not wait longer than it would have to work.
"""

from __future__ import annotations

import logging
from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

from cedar.engine.request import DecoderReplay, FinishReason
from cedar.engine.sequence import Sequence, SequenceState
from cedar.engine.work import DecodeWork, PrefillWork, Runner, SequenceMemory, StepWork, TailWork

log = logging.getLogger(__name__)

ATTACH_GRACE_NS = 50_000_000
"""How long after `ready` an attach counts as on its way (it is a message through two processes)."""

MAX_LOOKUPS = 32
"""Sequences that look for pages again in one plan: of a crowd, about as many as can go on in one step."""


@dataclass
class StepPlan:
    """One step, before it is run. ``prefills``: sequence and number of tokens."""

    prefills: list[tuple[Sequence, int]] = field(default_factory=list)
    tails: list[Sequence] = field(default_factory=list)
    decodes: list[Sequence] = field(default_factory=list)
    rows: int = 0
    """All rows, tails by what they keep."""
    bulk_rows: int = 0
    """Of these, chunks of prompts that stand back for short ones."""
    preempted: list[Sequence] = field(default_factory=list)
    failed: list[tuple[Sequence, Exception]] = field(default_factory=list)
    """No memory could be made for them: not for want of room, something broke."""
    stuck: list[Sequence] = field(default_factory=list)
    """Alone and still without room, though the runner said that they would fit."""

    @property
    def empty(self) -> bool:
        """Nothing to run."""
        return not (self.prefills or self.tails or self.decodes)

    @property
    def sampled(self) -> list[Sequence]:
        """The sequences of the logits' rows."""
        return self.tails + self.decodes

    def work(self) -> StepWork:
        """The runner's form."""
        return StepWork(
            prefills=[_chunk(seq, count) for seq, count in self.prefills],
            tails=[TailWork(_memory(seq)) for seq in self.tails],
            decodes=[DecodeWork(_memory(seq), seq.num_tokens - 1, seq.ids[-1]) for seq in self.decodes],
        )


class Scheduler:
    """Owns the queues and the sequences' memory: it alone opens, reserves and closes it."""

    def __init__(self, runner: Runner, *, max_num_batched_tokens: int, max_num_seqs: int, window: int, halo: int) -> None:
        self._runner = runner
        self._budget = max_num_batched_tokens
        self._max_num_seqs = max_num_seqs
        self._tail_rows = {DecoderReplay.BOUNDED: window, DecoderReplay.EXACT: halo, DecoderReplay.OFF: 1}
        self._short = max_num_batched_tokens // 4
        self._bulk_due_ns = 0
        self._may_fit = True
        """Something has changed since the head of the queue did not fit."""
        self._step = 0
        self.waiting: list[Sequence] = []
        """Without memory (WAITING, PREEMPTED), in order of rank."""
        self.open: list[Sequence] = []
        """With memory (ENCODING, ENCODED, DECODING), in order of rank."""
        self.held_until_ns: int | None = None
        """The last plan kept bulk back; if it was empty for that reason, the next one need not be made before."""

    @property
    def free_seats(self) -> int:
        """Sequences that may be opened before ``max_num_seqs`` is reached."""
        return self._max_num_seqs - len(self.open)

    @property
    def num_new(self) -> int:
        """Waiting sequences that have never run; preempted ones take no place in the bounded queue."""
        return sum(seq.state is SequenceState.WAITING for seq in self.waiting)

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence."""
        _insert(self.waiting, seq)
        self._may_fit = True

    def end(self, seq: Sequence, reason: FinishReason) -> None:
        """Finish a sequence in any state and close its memory. One that went wrong leaves nothing behind for others to find."""
        (self.open if seq.has_memory else self.waiting).remove(seq)
        self._may_fit = True
        memory = seq.finish(reason)
        if memory is not None:
            self._runner.close(memory, forget=reason is FinishReason.ERROR)

    def schedule(self, now_ns: int) -> StepPlan:
        """Plan the next step: preempts and opens as needed. The plan must be run, or its sequences ended."""
        self._step += 1
        self.held_until_ns = None
        plan = StepPlan()
        self._reserve_decodes(plan)
        if not plan.preempted:  # memory that was just taken for a decode must not be given away in the same breath
            self._open_waiting(plan)
        decoding = [seq for seq in self.open if seq.state is SequenceState.DECODING]
        encoding = [seq for seq in self.open if seq.state is SequenceState.ENCODING]
        tails = [seq for seq in decoding if seq.needs_tail]
        decodes = [seq for seq in decoding if not seq.needs_tail]

        limit = self._budget - max(1, self._budget // 4) if tails or encoding else self._budget
        plan.decodes = sorted(decodes, key=lambda seq: (seq.last_decode_step, seq.rank))[:limit]
        for seq in plan.decodes:
            seq.last_decode_step = self._step
        room = self._budget - len(plan.decodes)
        self._follow(encoding)
        bulk_is_due = now_ns >= self._bulk_due_ns and not all(map(self._is_short, encoding))
        kept = room // 2 if bulk_is_due else 0
        room = kept + self._plan_tails(plan, tails, room - kept)
        room = self._plan_prefills(plan, encoding, room, kept, now_ns)
        plan.rows = self._budget - room
        return plan

    def ran(self, plan: StepPlan, start_ns: int, end_ns: int) -> None:
        """The plan was run in that time: bulk stands back for as long as its share of it."""
        self._may_fit |= bool(plan.prefills or plan.tails)  # there are new pages to share, or boundary rows are gone
        if plan.bulk_rows:
            self._bulk_due_ns = end_ns + (end_ns - start_ns) * plan.bulk_rows // plan.rows

    # memory

    def _reserve_decodes(self, plan: StepPlan) -> None:
        """Make room for the next token of every decoding sequence, taking it from the end of the ranks."""
        for seq in [seq for seq in self.open if seq.state is SequenceState.DECODING and not seq.needs_tail]:
            while seq.has_memory and not self._runner.reserve(_memory(seq), seq.num_tokens):
                victim = self.open[-1]
                if victim is self.open[0]:
                    plan.stuck.append(victim)
                plan.preempted.append(victim)
                self.open.remove(victim)
                self._runner.close(victim.preempt())
                self._may_fit = True
                _insert(self.waiting, victim)

    def _open_waiting(self, plan: StepPlan) -> None:
        while self.waiting and self.free_seats > 0 and self._may_fit:
            seq = self.waiting[0]
            try:
                memory = self._open(seq)
            except Exception as error:
                log.exception("request_key %s: no memory was made for it", seq.request.key)
                plan.failed.append((seq, error))
                return
            if memory is None:
                self._may_fit = False
                if not self.open:
                    plan.stuck.append(seq)
                return
            seq.start(memory)
            _insert(self.open, self.waiting.pop(0))

    def _open(self, seq: Sequence) -> SequenceMemory | None:
        """Memory for all tokens and the next one; without the next one, a sequence would often be preempted at once."""
        return self._runner.open(seq.prompt, min(seq.num_tokens + 1, seq.max_positions))

    def _look_again(self, seq: Sequence) -> None:
        """Nothing of ``seq`` was encoded since it was opened, and others may have published its beginning meanwhile."""
        if self._runner.finds_more(_memory(seq), seq.prompt):
            self._runner.close(seq.release())
            memory = self._open(seq)
            assert memory is not None, "it needs less than what it has just given back"
            seq.reopened(memory)

    def _should_yield(self, seq: Sequence, chunks: Iterable[Sequence]) -> bool:
        """Does one that gets rows in this step encode the beginning of ``seq``, which it can find when that is done?"""
        for other in chunks:
            if seq.leader is not None and seq.leader[0] is other:
                common = seq.leader[1]
                return common > other.num_encoded and self._runner.gains(_memory(other), _memory(seq), seq.prompt, common)
            if not other.prompt.serves(seq.prompt):
                continue
            common = seq.chain.common_pages(other.chain) * seq.chain.page_tokens
            if common > other.num_encoded and self._runner.gains(_memory(other), _memory(seq), seq.prompt, common):
                seq.leader = other, common
                return True
        return False

    def _follow(self, encoding: list[Sequence]) -> None:
        """Those that yielded to one that has encoded what they have in common, or is gone, look for it."""
        yielded = (seq for seq in encoding if seq.untouched and seq.leader is not None and not _leads(*seq.leader))
        for seq in islice(yielded, MAX_LOOKUPS):
            seq.leader = None
            self._look_again(seq)

    # the parts of a plan

    def _plan_tails(self, plan: StepPlan, tails: list[Sequence], room: int) -> int:
        for seq in tails:
            rows = min(self._tail_rows[seq.decoder_replay], seq.num_tokens)
            if rows <= room or not plan.tails:
                plan.tails.append(seq)
                room -= rows
        return room

    def _plan_prefills(self, plan: StepPlan, encoding: list[Sequence], room: int, kept: int, now_ns: int) -> int:
        chunks: dict[Sequence, int] = {}
        for seq in filter(self._is_short, encoding):
            count = min(seq.num_to_encode, room - kept)
            if count > 0:
                chunks[seq] = count
                room -= count
        bulk = [seq for seq in encoding if not self._is_short(seq)]
        if bulk and room > 0:
            attach_ns = self._attach_expected_until(now_ns)
            urgent = bool(chunks) or any(self._is_short(seq) for seq in plan.tails) or attach_ns > now_ns
            if urgent and now_ns < self._bulk_due_ns:
                self.held_until_ns = min(self._bulk_due_ns, attach_ns)
            else:
                shares = self._shares(bulk, room)
                chunks |= shares
                plan.bulk_rows = sum(shares.values())
        plan.prefills = list(chunks.items())
        return room - plan.bulk_rows

    def _shares(self, bulk: list[Sequence], room: int) -> dict[Sequence, int]:
        """Half of the room to the first in rank, then by (priority, what is left), what remains to the first again."""
        first = bulk[0]
        half = (room + 1) // 2
        nearest = sorted(bulk[1:], key=lambda seq: (seq.request.priority, seq.num_to_encode, seq.rank))
        shares: dict[Sequence, int] = {}
        for seq, limit in ((first, half), *((seq, room) for seq in nearest), (first, room)):
            if room <= 0:
                break
            if seq.untouched and seq not in shares:
                if self._should_yield(seq, shares):
                    continue
                self._look_again(seq)
            count = min(limit, room, seq.num_to_encode - shares.get(seq, 0))
            if count > 0:
                shares[seq] = shares.get(seq, 0) + count
                room -= count
        return shares

    def _is_short(self, seq: Sequence) -> bool:
        return seq.num_tokens - seq.encode_start <= self._short

    def _attach_expected_until(self, now_ns: int) -> int:
        """The end of the last short prompt's grace, ``now_ns`` when nobody is expected."""
        grace = (
            seq.encoded_ns + ATTACH_GRACE_NS
            for seq in self.open
            if seq.state is SequenceState.ENCODED and seq.encoded_ns is not None and self._is_short(seq)
        )
        return max(grace, default=now_ns)


def _leads(leader: Sequence, common: int) -> bool:
    return leader.state is SequenceState.ENCODING and leader.num_encoded < common


def _chunk(seq: Sequence, count: int) -> PrefillWork:
    start, end = seq.num_encoded, seq.num_encoded + count
    return PrefillWork(
        seq=_memory(seq),
        start=start,
        token_ids=seq.ids[start:end],
        last=end == seq.num_tokens,
        all_logits=seq.wants_prompt_logits,
    )


def _memory(seq: Sequence) -> SequenceMemory:
    assert seq.memory is not None, f"{seq.handle}: no memory in state {seq.state.name}"
    return seq.memory


def _insert(queue: list[Sequence], seq: Sequence) -> None:
    insort(queue, seq, key=lambda other: other.rank)
