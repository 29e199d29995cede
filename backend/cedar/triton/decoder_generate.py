# SPDX-License-Identifier: Apache-2.0
"""Step 3: has the engine generate, turns tokens into text, and gives a sign of life while there are none.

It runs once per response of `encoder_prefill`: for a tick it only looks whether the client is gone.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

from cedar.config.engine import EngineConfig
from cedar.errors import CedarError
from cedar.text.tokenizer import load_tokenizer
from cedar.triton import responses
from cedar.triton.checkpoint import model_directory
from cedar.triton.envelope import Envelope
from cedar.triton.link import JOIN_TIMEOUT_S, EngineLink, end_with_server, run_guarded
from cedar.triton.logs import start_logging
from cedar.triton.output import SequenceOutput, empty_values
from cedar.triton.tensors import STEPS
from cedar.v1 import engine_pb2 as pb

OUTPUTS = STEPS[2].outputs


@dataclass(eq=False)
class Stream:
    """A sequence that is being generated. ``inbox`` is filled by the engine client's thread; its size is bounded by the
    sequence's own length, since tokens that wait are sent together."""

    sender: Any
    key: str
    handle: str
    output: SequenceOutput
    fixed: dict[str, object]
    last_sent: float
    inbox: list[pb.SequenceTokens] = field(default_factory=list)


class DecoderGenerate:
    """Decoupled. One thread sends everything; the engine client's thread only fills inboxes and never waits."""

    def initialize(self, args: dict[str, str]) -> None:
        """Returns when the engine accepts requests."""
        end_with_server()
        self._config = EngineConfig.load()
        start_logging(self._config, args["model_name"])
        self._tokenizer = load_tokenizer(model_directory(self._config))
        self._tick_s = self._config.tick_ms / 1000
        self._link = EngineLink(self._config)
        self._changed = threading.Condition()
        self._streams: set[Stream] = set()
        self._woken: list[Stream] = []
        self._closed = False
        self._next_tick = 0.0
        self._thread = threading.Thread(target=run_guarded, args=(self._turn,), name="cedar-send", daemon=True)
        self._thread.start()

    def execute(self, requests: list[Any]) -> None:
        """One child request: a tick, or the start of a sequence."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                self._begin(request, sender, responses.inputs(request))
            except CedarError as error:
                responses.send(sender, responses.failure(error))
            except Exception:
                failure = responses.internal(request.request_id() or "(no id)", "its generation was started")
                responses.send(sender, responses.failure(failure))

    def _begin(self, request: Any, sender: Any, tensors: responses.Arrays) -> None:
        ready = bool(tensors["_ready"][0])
        handle = tensors["_sequence_handle"][0].decode()
        gone = request.is_cancelled()
        if not ready and not gone:
            responses.send(sender, None)
            return
        envelope = Envelope.model_validate_json(tensors["_request"][0])
        fixed: dict[str, object] = {
            "seed_used": envelope.sampling.seed or 0,
            "_sequence_handle": handle,
            "_stream": envelope.reply.stream,
            **{name: int(tensors[f"_{name}"][0]) for name in ("num_input_tokens", "cached_tokens", "replayed_tokens")},
        }
        if gone:
            self._link.abort(handle, envelope.key)
            responses.send(sender, None)
        elif envelope.ended:
            responses.send(sender, responses.response(OUTPUTS, {**fixed, **empty_values(envelope.ended), "_keep_alive": False}))
        else:
            output = SequenceOutput(envelope, self._tokenizer, self._config.max_output_bytes)
            stream = Stream(sender, envelope.key, handle, output, fixed, time.monotonic())
            with self._changed:
                self._streams.add(stream)
                self._changed.notify()
            self._link.client.attach(handle, lambda tokens: self._receive(stream, tokens))

    def _receive(self, stream: Stream, tokens: pb.SequenceTokens) -> None:
        """On the engine client's thread: never waits."""
        with self._changed:
            if not stream.inbox:
                self._woken.append(stream)
                self._changed.notify()
            stream.inbox.append(tokens)

    def _turn(self) -> bool:
        """Wait for the next thing to send, and send it."""
        with self._changed:
            while not self._woken and not self._closed and (wait := self._next_tick - time.monotonic()) > 0:
                self._changed.wait(wait if self._streams else None)
            woken = [(stream, stream.inbox) for stream in self._woken]
            for stream in self._woken:
                stream.inbox = []
            self._woken = []
            if self._closed and not woken:
                return False
        for stream, inbox in woken:
            self._advance(stream, inbox)
        if (now := time.monotonic()) >= self._next_tick:
            self._next_tick = now + self._tick_s / 2  # so that none is silent for longer than a tick
            self._keep_alive(now)
        return True

    def _advance(self, stream: Stream, inbox: list[pb.SequenceTokens]) -> None:
        """Send what the inbox holds as one response."""
        if stream not in self._streams:
            return  # ended here already: these are the engine's last words
        output = stream.output
        try:
            for tokens in inbox:
                output.feed(tokens)
            if not output.has_data():
                return
            message = (
                responses.failure(output.error)
                if output.error
                else responses.response(OUTPUTS, {**stream.fixed, **output.take(), "_keep_alive": False})
            )
            ended, abort = output.ended, output.ended_here
        except Exception:
            message = responses.failure(responses.internal(stream.key, "its tokens were turned into text"))
            ended = abort = True
        if ended:
            with self._changed:
                self._streams.discard(stream)
        if abort:
            self._link.abort(stream.handle)
        elif output.error:
            self._link.recover()
        responses.send(stream.sender, message, final=ended)
        stream.last_sent = time.monotonic()

    def _keep_alive(self, now: float) -> None:
        """A response without data for every sequence that sent none for a tick: `deliver` sees with it that a client is gone."""
        with self._changed:
            silent = [stream for stream in self._streams if now - stream.last_sent >= self._tick_s / 2]
        for stream in silent:
            message = responses.response(OUTPUTS, {**stream.fixed, **empty_values(), "_keep_alive": True})
            responses.send(stream.sender, message, final=False)
            stream.last_sent = now

    def finalize(self) -> None:
        """The server unloads the model: what is left ends with an error."""
        self._link.close()
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(JOIN_TIMEOUT_S)
