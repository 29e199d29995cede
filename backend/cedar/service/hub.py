# SPDX-License-Identifier: Apache-2.0
"""From the engine's thread to the calls of the event loop: what each sequence gained and nobody has sent yet.

Nothing is queued. A sequence has one unsent message at most, and each step's update is merged into it in place, so a
reader that lags makes messages longer and not more numerous.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict

from cedar.engine.request import FinishReason
from cedar.engine.updates import SequenceUpdate
from cedar.errors import ErrorCode
from cedar.service.convert import merge_tokens, progress_to_proto
from cedar.v1 import engine_pb2 as pb

MAX_ENDED = 1024
"""Ended sequences whose last message nobody has attached for; beyond that the oldest is forgotten."""


class TokenStream:
    """The sending end of one Generate call."""

    def __init__(self) -> None:
        self.wake = asyncio.Event()
        """There is something to send."""
        self.urgent = asyncio.Event()
        """It holds a first or a last token, which does not wait for later ones to share its message."""
        self.silent = False
        """Nothing may be to send, but a sign of life is due."""
        self.attached: set[str] = set()
        """Handles that have not ended."""
        self.unsent: dict[str, pb.SequenceTokens] = {}
        """Guarded by the hub's lock."""


class Record:
    """One sequence as its callers see it."""

    __slots__ = ("changed", "last", "progress", "stream")

    def __init__(self, handle: str) -> None:
        self.changed = asyncio.Event()
        """Its encoding went on, or it ended."""
        self.progress = pb.EncodeProgress(handle=handle)
        self.stream: TokenStream | None = None
        self.last: pb.SequenceTokens | None = None
        """Set when it has ended."""

    @property
    def cancelled(self) -> bool:
        return self.last is not None and self.last.finish_reason == FinishReason.CANCELLED.value


class UpdateHub:
    """Routes updates by handle. `publish` runs on the engine's thread, everything else on the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._live: dict[str, Record] = {}
        self._ended: OrderedDict[str, Record] = OrderedDict()
        self._to_wake: set[asyncio.Event] = set()

    def publish(self, updates: list[SequenceUpdate]) -> None:
        """The engine's sink: merge one step's updates and wake whoever waits for them, with one wake-up per step."""
        with self._lock:
            idle = not self._to_wake
            for update in updates:
                self._merge(update)
            must_wake = idle and bool(self._to_wake)
        if must_wake:
            self._loop.call_soon_threadsafe(self._wake)

    def _merge(self, update: SequenceUpdate) -> None:
        record = self._live.get(update.handle)
        if record is None:  # its first step may come before `Encode` has learnt the handle
            record = self._live[update.handle] = Record(update.handle)
        if update.ready or update.encoded_tokens:
            record.progress = progress_to_proto(update)
            self._to_wake.add(record.changed)
        ended = update.finish_reason is not None
        if not ended and not update.token_ids:
            return
        stream = record.stream
        message = stream.unsent.get(update.handle) if stream is not None else None
        if message is None:
            message = pb.SequenceTokens(handle=update.handle)
        merge_tokens(message, update)
        if stream is not None:
            stream.unsent[update.handle] = message
            self._to_wake.add(stream.wake)
            if ended or update.num_output_tokens == len(update.token_ids):
                self._to_wake.add(stream.urgent)
        if ended:
            record.last = message
            self._to_wake.add(record.changed)
            del self._live[update.handle]
            if stream is None:
                self._remember(update.handle, record)

    def _remember(self, handle: str, record: Record) -> None:
        self._ended[handle] = record
        if len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)

    def _wake(self) -> None:
        with self._lock:
            events, self._to_wake = self._to_wake, set()
        for event in events:
            event.set()

    def record(self, handle: str, num_input_tokens: int) -> Record:
        """The record of a sequence that the engine has just admitted. Its prompt's length is known before it is encoded."""
        with self._lock:
            record = self._ended.get(handle) or self._live.setdefault(handle, Record(handle))
            record.progress.num_input_tokens = num_input_tokens
            return record

    def forget(self, handle: str) -> None:
        """Nobody will attach to this sequence any more."""
        with self._lock:
            self._ended.pop(handle, None)

    def attach(self, handle: str, stream: TokenStream) -> bool:
        """From now on ``stream`` gets the sequence's tokens. False: it has ended, is unknown or belongs to another
        stream; this stream then gets its last message at once."""
        with self._lock:
            record = self._live.get(handle)
            if record is not None and record.stream in (None, stream):
                record.stream = stream
                stream.attached.add(handle)
                return True
            ended = self._ended.pop(handle, None)
            last = ended.last if ended is not None else None
            self._answer(stream, last or _refusal(handle, "is attached elsewhere" if record else "is not known"))
        return False

    @property
    def num_live(self) -> int:
        """Sequences that have not ended."""
        return len(self._live)

    def is_live(self, handle: str) -> bool:
        """Whether the engine may still have something to say about it."""
        return handle in self._live

    def answer_unknown(self, handle: str, stream: TokenStream) -> None:
        """The last message for a command that named a sequence which is not live."""
        with self._lock:
            self._answer(stream, _refusal(handle, "is not known"))

    def _answer(self, stream: TokenStream, message: pb.SequenceTokens) -> None:
        stream.unsent.setdefault(message.handle, message)
        stream.wake.set()
        stream.urgent.set()

    def take(self, stream: TokenStream) -> list[pb.SequenceTokens]:
        """Everything unsent of a stream; the caller owns the messages from then on."""
        stream.wake.clear()
        stream.urgent.clear()
        with self._lock:
            messages, stream.unsent = list(stream.unsent.values()), {}
        stream.attached.difference_update(message.handle for message in messages if message.finish_reason)
        return messages


def _refusal(handle: str, problem: str) -> pb.SequenceTokens:
    return pb.SequenceTokens(
        handle=handle,
        finish_reason=FinishReason.ERROR.value,
        error_code=ErrorCode.UNAVAILABLE.value,
        error_message=f"sequence {handle} {problem} (its lease has ended, or the engine was restarted)",
    )
