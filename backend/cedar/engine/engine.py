# SPDX-License-Identifier: Apache-2.0
"""Requests in, updates out. Synchronous and deterministic for a given clock; one thread owns it (see `loop.py`).

The life of a request: `add` checks it and queues it; a later `step` finds memory and encodes its prompt, chunk by chunk;
the update with ``ready`` tells the caller, who has a lease's time to `attach`; then every step gives it a token until
`_end`, the only place where a request ends, for whatever reason.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from cedar.config.engine import EngineConfig
from cedar.engine.admission import Admission, ModelFacts
from cedar.engine.logprobs import prompt_logprobs
from cedar.engine.request import FinishReason, GenerationRequest
from cedar.engine.sampler import Sampled, Sampler, SamplingState
from cedar.engine.scheduler import Scheduler, StepPlan
from cedar.engine.sequence import Sequence
from cedar.engine.stats import EngineStats, Metric, NullRecorder, Recorder
from cedar.engine.updates import SequenceUpdate
from cedar.engine.work import Runner, StepResult
from cedar.errors import CedarError, ErrorCode, invalid, unavailable
from cedar.text.output import OutputText
from cedar.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

MAX_FAILED_STEPS = 3
"""Failures without a good step between them after which the engine gives up: a device that is lost fails every step, and
only a new process gets it back."""


@dataclass(frozen=True)
class Clock:
    """Two readings in nanoseconds: one that never jumps for all decisions, and the date, to talk to other processes."""

    monotonic_ns: Callable[[], int] = time.monotonic_ns
    unix_ns: Callable[[], int] = time.time_ns


@dataclass
class _Live:
    """A sequence with what the engine keeps beside it."""

    seq: Sequence
    sampling: SamplingState
    text: OutputText | None  # only requests with stop strings pay for detokenisation here
    unix_offset_ns: int


class Engine:
    """The policy half of the engine: queues, memory decisions, sampling, endings. The runner does the arithmetic."""

    def __init__(
        self,
        runner: Runner,
        config: EngineConfig,
        facts: ModelFacts,
        *,
        tokenizer: Tokenizer | None = None,
        recorder: Recorder | None = None,
        clock: Clock | None = None,
    ) -> None:
        """``tokenizer``: needed by requests with stop strings; without it they are refused."""
        self._runner = runner
        self._tokenizer = tokenizer
        self._recorder = recorder or NullRecorder()
        self._clock = clock or Clock()
        self._facts = facts
        self._max_waiting = config.max_waiting
        self._prefix_cache = config.prefix_cache
        self._lease_ns = config.lease_ms * 1_000_000
        self._admission = Admission(runner, config, facts)
        self._scheduler = Scheduler(
            runner,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
            window=facts.window,
            halo=facts.halo,
        )
        self._sampler = Sampler(facts.num_valid_ids)
        self._live: dict[str, _Live] = {}
        self._handles: dict[str, str] = {}
        """Request key to handle, of live requests."""
        self._updates: dict[str, SequenceUpdate] = {}
        self._draining = False
        self._stalled = False
        """The last plan was empty, and nothing has happened since that could change the next one."""
        self._failed_steps = 0
        """In a row."""
        self._instance = secrets.token_hex(8)
        self._serial = 0

    # commands

    def add(self, request: GenerationRequest) -> str:
        """Queue a request and return its handle, unique for ever.

        Raises CedarError: INVALID_ARGUMENT (field, problem, what is allowed), UNAVAILABLE (queue full, draining),
        DEADLINE_EXCEEDED (over before it began).
        """
        if self._draining:
            raise unavailable("the server is draining and takes no new requests")
        if request.key in self._handles:
            raise invalid("request_key", f"{request.key} is a live request", "a key that is not in use")
        if request.sampling.stop and self._tokenizer is None:
            raise invalid("stop", "this engine has no tokenizer", "stop_token_ids")
        max_tokens = self._admission.check(request)
        seq, unix_offset_ns = self._sequence(request, max_tokens)
        if self._scheduler.num_new >= self._max_waiting + self._scheduler.free_seats:
            raise unavailable(f"{self._scheduler.num_new} requests wait already; max_waiting is {self._max_waiting}")
        sampling = request.sampling
        seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
        self._live[seq.handle] = _Live(
            seq=seq,
            sampling=SamplingState(sampling, request.input_ids, seq.end_ids, seed),
            text=OutputText(self._tokenizer, sampling.stop, sampling.min_tokens) if sampling.stop and self._tokenizer else None,
            unix_offset_ns=unix_offset_ns,
        )
        self._handles[request.key] = seq.handle
        self._scheduler.add(seq)
        self._stalled = False
        return seq.handle

    def attach(self, handle: str) -> bool:
        """Somebody takes the tokens of ``handle`` from now on. False: no such live sequence."""
        live = self._live.get(handle)
        if live is None:
            return False
        live.seq.attach()
        self._stalled = False
        return True

    def abort(self, *, handle: str | None = None, key: str | None = None) -> bool:
        """End a request as cancelled, in any state, at once; by its handle, or by its request key. False: not live."""
        live = self._live.get(handle or self._handles.get(key or "", ""))
        if live is None:
            return False
        self._end(live, FinishReason.CANCELLED)
        return True

    def clear_cache(self) -> int:
        """Forget what is cached for later prompts. Returns the tokens forgotten; running requests keep what they use."""
        return self._runner.clear_cache()

    def drain(self) -> None:
        """Refuse new requests from now on; those inside go on."""
        self._draining = True

    def end_all(self, error: CedarError) -> list[SequenceUpdate]:
        """End everything with ``error`` (shutdown, or an engine that cannot go on) and return the last updates."""
        for live in list(self._live.values()):
            try:
                self._end(live, FinishReason.ERROR, error)
            except Exception:
                log.exception("request_key %s: its memory could not be given back", live.seq.request.key)
        return self._flush()

    # state

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return len(self._live)

    def stats(self) -> EngineStats:
        """A snapshot."""
        return EngineStats(
            num_running=len(self._scheduler.open),
            num_waiting=len(self._scheduler.waiting),
            draining=self._draining,
            usage=self._runner.usage(),
        )

    def has_work(self) -> bool:
        """Would `step` do something now? If not, nothing will before `next_deadline` or a command."""
        if self._updates or (self._live and not self._stalled):
            return True
        deadline = self.next_deadline()
        return deadline is not None and deadline <= self._clock.monotonic_ns()

    def next_deadline(self) -> int | None:
        """Monotonic nanoseconds of the next thing that happens by itself: a deadline, a lease, the end of a hold."""
        times = [time for live in self._live.values() for time in (live.seq.deadline_ns, live.seq.lease_ns) if time is not None]
        if self._stalled and self._scheduler.held_until_ns is not None:
            times.append(self._scheduler.held_until_ns)
        return min(times, default=None)

    def now_ns(self) -> int:
        """The clock that `next_deadline` is on."""
        return self._clock.monotonic_ns()

    # stepping

    def step(self) -> list[SequenceUpdate]:
        """Expire, plan, run, sample. Returns one update per sequence that changed since the last step.

        An exception of the runner ends every sequence that holds memory (any of them may have been half written) with
        INTERNAL; the waiting ones and those to come are served. The last of `MAX_FAILED_STEPS` in a row is raised.
        """
        now = self._clock.monotonic_ns()
        self._expire(now)
        plan = self._scheduler.schedule(now)
        self._stalled = plan.empty and not plan.preempted and not plan.failed
        if plan.preempted:
            self._recorder.count(Metric.PREEMPTIONS, len(plan.preempted))
        for seq, error in plan.failed:
            self._end(self._live[seq.handle], FinishReason.ERROR, _internal(seq, f"no memory was made for it ({error})"))
        for seq in plan.stuck:
            self._end(self._live[seq.handle], FinishReason.ERROR, _internal(seq, "it does not fit in the empty kv budget"))
        if not plan.empty:
            try:
                self._run(plan, now)
            except Exception as error:
                log.exception("a step failed; it held %s", [seq.request.key for seq in self._scheduler.open])
                for seq in list(self._scheduler.open):
                    cause = f"the step that ran it failed ({type(error).__name__}: {error})"
                    self._end(self._live[seq.handle], FinishReason.ERROR, _internal(seq, cause))
                self._failed_steps += 1
                if self._failed_steps >= MAX_FAILED_STEPS:
                    raise
            else:
                self._failed_steps = 0
        self._record_gauges()
        return self._flush()

    def _run(self, plan: StepPlan, start_ns: int) -> None:
        for seq, _ in plan.prefills:
            if seq.first_scheduled_ns is None:
                seq.first_scheduled_ns = start_ns
            self._count_hit(seq)
        starts = [seq.num_encoded for seq, _ in plan.prefills]
        result = self._runner.step(plan.work())
        for index, ((seq, count), start) in enumerate(zip(plan.prefills, starts, strict=True)):
            if seq.num_encoded != start + count:
                raise RuntimeError(f"the runner encoded {seq.num_encoded - start} tokens of a chunk of {count}")
            if seq.wants_prompt_logits:
                self._take_prompt_logits(seq, start, result.prompt_logits[index])
        samples = self._sample(plan, result)
        end_ns = self._clock.monotonic_ns()
        self._scheduler.ran(plan, start_ns, end_ns)
        for seq, _ in plan.prefills:
            self._encoded_chunk(seq, end_ns)
        for seq, sample in zip(plan.sampled, samples, strict=True):
            self._sampled(self._live[seq.handle], sample, end_ns)

    def _sample(self, plan: StepPlan, result: StepResult) -> list[Sampled | None]:
        if not plan.sampled:
            return []
        if result.logits is None or result.logits.shape[0] != len(plan.sampled):
            raise RuntimeError(f"the runner gave no logits for {len(plan.sampled)} rows")
        return self._sampler.sample(result.logits, [self._live[seq.handle].sampling for seq in plan.sampled])

    def _take_prompt_logits(self, seq: Sequence, start: int, logits: torch.Tensor) -> None:
        count = seq.request.sampling.prompt_logprobs or 0
        seq.prompt_logprobs += prompt_logprobs(logits, seq.request.input_ids, start, count, self._facts.num_valid_ids)

    def _encoded_chunk(self, seq: Sequence, now_ns: int) -> None:
        done = seq.num_to_encode == 0
        if not seq.announced:
            update = self._update(seq)
            update.encoded_tokens = seq.num_encoded
            update.ready = done
            if done:
                seq.announced = True
                self._recorder.count(Metric.PROMPT_TOKENS, seq.num_prompt_tokens)
        if done:
            seq.encoded(now_ns, self._lease_ns)

    def _count_hit(self, seq: Sequence) -> None:
        """Once per encoding, those after a preemption included: what was looked up, found, and run again."""
        if seq.hit_counted or seq.memory is None:
            return
        seq.hit_counted = True
        if self._prefix_cache and not seq.wants_prompt_logits:
            self._recorder.count(Metric.PREFIX_QUERIES, seq.num_tokens)
            self._recorder.count(Metric.PREFIX_HITS, seq.memory.num_cached)
            self._recorder.count(Metric.REPLAYED_TOKENS, seq.memory.num_replayed)

    def _sampled(self, live: _Live, sample: Sampled | None, now_ns: int) -> None:
        seq = live.seq
        if sample is None:
            self._end(live, FinishReason.ERROR, _internal(seq, "its logits are not finite"))
            return
        update = self._update(seq)
        if seq.first_token_ns is None:
            update.prompt_logprobs, seq.prompt_logprobs = seq.prompt_logprobs, []
            self._recorder.observe(Metric.TTFT, (now_ns - seq.arrival_ns) / 1e9)
        elif seq.last_token_ns is not None:
            self._recorder.observe(Metric.INTER_TOKEN, (now_ns - seq.last_token_ns) / 1e9)
        self._recorder.count(Metric.GENERATION_TOKENS)
        seq.append(sample.token_id, now_ns)
        update.token_ids.append(sample.token_id)
        update.num_output_tokens = seq.num_output_tokens
        if sample.logprobs is not None:
            update.logprobs.append(sample.logprobs)
        stopped = live.text is not None and live.text.push(sample.token_id).matched is not None
        if sample.token_id in seq.end_ids or stopped:
            self._end(live, FinishReason.STOP)
        elif seq.num_output_tokens >= seq.max_tokens:
            self._end(live, FinishReason.LENGTH)

    # endings

    def _expire(self, now_ns: int) -> None:
        for live in list(self._live.values()):
            seq = live.seq
            if seq.deadline_ns is not None and seq.deadline_ns <= now_ns:
                self._end(live, FinishReason.DEADLINE, _deadline(self._admission.timeout_ms(seq.request)))
            elif seq.lease_ns is not None and seq.lease_ns <= now_ns:
                log.info("request_key %s: nobody attached within the lease", seq.request.key)
                self._end(live, FinishReason.CANCELLED)

    def _end(self, live: _Live, reason: FinishReason, error: CedarError | None = None) -> None:
        """The one way in which a request ends: the last update, the counts, the memory. Its handle is dead afterwards."""
        seq = live.seq
        del self._live[seq.handle], self._handles[seq.request.key]
        self._stalled = False
        update = self._update(seq)
        update.finish_reason, update.error = reason, error
        update.timing = timing = seq.timing(live.unix_offset_ns)
        self._recorder.count(Metric.SUCCESS, finished_reason=reason.value)
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._recorder.observe(Metric.E2E, (timing.last_token_ns - timing.arrival_ns) / 1e9)
            self._recorder.observe(Metric.QUEUE_TIME, timing.queue_s)
            self._recorder.observe(Metric.PREFILL_TIME, timing.prefill_s)
            self._recorder.observe(Metric.DECODE_TIME, timing.decode_s)
            self._recorder.observe(Metric.REQUEST_PROMPT_TOKENS, seq.num_prompt_tokens)
            self._recorder.observe(Metric.REQUEST_GENERATION_TOKENS, seq.num_output_tokens)
        self._scheduler.end(seq, reason)

    # helpers

    def _sequence(self, request: GenerationRequest, max_tokens: int) -> tuple[Sequence, int]:
        """A new sequence, and the difference between unix time and the engine's clock."""
        now, offset = self._clock.monotonic_ns(), self._clock.unix_ns() - self._clock.monotonic_ns()
        arrival = min(request.arrival_unix_ns - offset, now) if request.arrival_unix_ns else now
        timeout_ms = self._admission.timeout_ms(request)
        deadline = arrival + timeout_ms * 1_000_000 if timeout_ms else None
        if deadline is not None and deadline <= now:
            raise _deadline(timeout_ms)
        self._serial += 1
        seq = Sequence(
            f"{self._instance}-{self._serial}",
            self._serial,
            request,
            max_tokens=max_tokens,
            encoder_replay=self._admission.encoder_replay(request),
            decoder_replay=self._admission.decoder_replay(request),
            page_tokens=self._runner.page_tokens,
            end_ids=self._admission.end_ids(request),
            arrival_ns=arrival,
            deadline_ns=deadline,
        )
        return seq, offset

    def _update(self, seq: Sequence) -> SequenceUpdate:
        """This step's update of ``seq``."""
        update = self._updates.get(seq.handle)
        if update is None:
            update = SequenceUpdate(
                seq.handle,
                num_input_tokens=seq.num_prompt_tokens,
                cached_tokens=seq.num_cached_tokens,
                replayed_tokens=seq.num_replayed_tokens,
                num_output_tokens=seq.num_output_tokens,
            )
            self._updates[seq.handle] = update
        return update

    def _flush(self) -> list[SequenceUpdate]:
        updates, self._updates = list(self._updates.values()), {}
        return updates

    def _record_gauges(self) -> None:
        usage = self._runner.usage()
        self._recorder.gauge(Metric.RUNNING, len(self._scheduler.open))
        self._recorder.gauge(Metric.WAITING, len(self._scheduler.waiting))
        self._recorder.gauge(Metric.KV_USAGE, usage.pages_used / usage.pages_total if usage.pages_total else 0.0)
        self._recorder.gauge(Metric.KV_BYTES_PER_TOKEN, usage.kv_bytes_per_token)


def _internal(seq: Sequence, cause: str) -> CedarError:
    return CedarError(ErrorCode.INTERNAL, f"request_key {seq.request.key}: {cause}")


def _deadline(timeout_ms: int) -> CedarError:
    return CedarError(ErrorCode.DEADLINE_EXCEEDED, f"timeout_ms: the {timeout_ms} ms since arrival are over")
