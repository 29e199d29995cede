# SPDX-License-Identifier: Apache-2.0
"""Step 2: has the engine encode prompts, many at a time, and ticks meanwhile.

Triton does not tell a running step that its client is gone, but it marks the next child request as cancelled. A tick is
such a child: `decoder_generate` sees there that a request which waits or is being encoded is wanted no longer.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any

from cedar.config.engine import EngineConfig
from cedar.errors import CedarError
from cedar.triton import responses
from cedar.triton.envelope import Envelope
from cedar.triton.link import JOIN_TIMEOUT_S, EngineLink, end_with_server, run_guarded
from cedar.triton.logs import start_logging
from cedar.triton.tensors import STEPS
from cedar.v1 import engine_pb2 as pb

OUTPUTS = STEPS[1].outputs


@dataclass(eq=False)
class Pending:
    """A request whose prompt is not encoded yet. The engine client's thread sets ``handle`` and, once, ``result``."""

    sender: Any
    key: str
    request: bytes
    handle: str = ""
    result: pb.EncodeProgress | CedarError | None = None


class EncoderPrefill:
    """Decoupled: `execute` only submits. One thread sends everything, so a tick never follows the ready response."""

    def initialize(self, args: dict[str, str]) -> None:
        """Returns when the engine accepts requests."""
        end_with_server()
        config = EngineConfig.load()
        start_logging(config, args["model_name"])
        self._tick_s = config.tick_ms / 1000
        self._link = EngineLink(config)
        self._changed = threading.Condition()
        self._pending: set[Pending] = set()
        self._done: list[Pending] = []
        self._closed = False
        self._next_tick = 0.0
        self._thread = threading.Thread(target=run_guarded, args=(self._turn,), name="cedar-ticks", daemon=True)
        self._thread.start()

    def execute(self, requests: list[Any]) -> None:
        """Submit each request; its responses are sent later."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                self._submit(sender, responses.inputs(request))
            except CedarError as error:
                responses.send(sender, responses.failure(error))
            except Exception:
                failure = responses.internal(request.request_id() or "(no id)", "its prompt was handed to the engine")
                responses.send(sender, responses.failure(failure))

    def _submit(self, sender: Any, tensors: responses.Arrays) -> None:
        raw = tensors["_request"][0]
        envelope = Envelope.model_validate_json(raw)
        if envelope.ended:
            responses.send(sender, _response(raw, ready=True))
            return
        pending = Pending(sender, envelope.key, raw)
        request = envelope.generation_request(tensors["_input_ids"].tolist())
        with self._changed:
            self._pending.add(pending)
            self._changed.notify()
        self._link.client.encode(
            request,
            lambda progress: setattr(pending, "handle", progress.handle),
            lambda result: self._finish(pending, result),
        )

    def _finish(self, pending: Pending, result: pb.EncodeProgress | CedarError) -> None:
        """On the engine client's thread: never waits."""
        with self._changed:
            pending.result = result
            self._done.append(pending)
            self._changed.notify()

    def _turn(self) -> bool:
        """Wait for the next thing to send, and send it."""
        with self._changed:
            while not self._done and not self._closed and (wait := self._next_tick - time.monotonic()) > 0:
                self._changed.wait(wait if self._pending else None)
            done, self._done = self._done, []
            self._pending.difference_update(done)
            if self._closed and not done:
                return False
        for pending in done:
            self._reply(pending)
        if time.monotonic() >= self._next_tick:
            self._next_tick = time.monotonic() + self._tick_s
            self._tick()
        return True

    def _tick(self) -> None:
        with self._changed:
            waiting = [pending for pending in self._pending if pending.result is None]
        for pending in waiting:
            request = Envelope(key=pending.key).model_dump_json(exclude_defaults=True)
            responses.send(pending.sender, _response(request, handle=pending.handle), final=False)

    def _reply(self, pending: Pending) -> None:
        result = pending.result
        if isinstance(result, pb.EncodeProgress):
            counts = (result.num_input_tokens, result.cached_tokens, result.replayed_tokens)
            responses.send(pending.sender, _response(pending.request, True, result.handle, counts))
        elif result is not None:
            self._link.recover()
            responses.send(pending.sender, responses.failure(result))

    def finalize(self) -> None:
        """The server unloads the model: what is left ends with an error."""
        self._link.close()
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(JOIN_TIMEOUT_S)


def _response(request: bytes | str, ready: bool = False, handle: str = "", counts: tuple[int, int, int] = (0, 0, 0)) -> Any:
    """A tick, or the ready response; every tensor of the table is in it."""
    values = dict(zip((tensor.name for tensor in OUTPUTS), (handle, request, ready, *counts), strict=True))
    return responses.response(OUTPUTS, values)
