# SPDX-License-Identifier: Apache-2.0
"""What one sequence has to say: tokens in, the values of the public outputs out. Pure Python, no server."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

from cedar.engine.request import FinishReason
from cedar.errors import CedarError, ErrorCode
from cedar.text.output import OutputText
from cedar.text.tokenizer import Tokenizer
from cedar.triton.envelope import Envelope
from cedar.v1 import engine_pb2 as pb


class SequenceOutput:
    """Collects a sequence's tokens until `take`; text is whole characters, without stop strings.

    Once ``finish_reason`` or ``error`` is set nothing more is collected. ``ended_here``: we ended it, not the engine,
    which has to be told.
    """

    def __init__(self, envelope: Envelope, tokenizer: Tokenizer, max_output_bytes: int) -> None:
        self._reply = envelope.reply
        self._tokenizer = tokenizer
        self._output = OutputText(tokenizer, envelope.sampling.stop, envelope.sampling.min_tokens)
        self._room = max_output_bytes
        self._text: list[str] = [self._reply.echo]
        self._ids: list[int] = []
        self._logprobs: list[dict[str, Any]] = []
        self._prompt: list[dict[str, Any] | None] = []
        self._cumulative = 0.0
        self._timing: pb.Timing | None = None
        self._total = 0
        self.finish_reason = ""
        self.error: CedarError | None = None
        self.ended_here = False

    @property
    def ended(self) -> bool:
        """No more will come."""
        return bool(self.finish_reason) or self.error is not None

    def feed(self, message: pb.SequenceTokens) -> None:
        """Take in what the engine sent."""
        if self.ended:
            return
        self._ids += message.token_ids
        self._total += len(message.token_ids)
        self._feed_logprobs(message)
        for token_id in message.token_ids:
            result = self._output.push(token_id)
            self._append(result.emit)
            if result.matched is not None:
                self._end(FinishReason.STOP)
        if message.finish_reason:
            self._finish(message)
            self.ended_here = False

    def _finish(self, message: pb.SequenceTokens) -> None:
        self._timing = message.timing
        failed = message.finish_reason == FinishReason.ERROR
        # a deadline keeps the text that there is; without any it is an error
        if failed or (message.finish_reason == FinishReason.DEADLINE and not self._total):
            code = ErrorCode.INTERNAL if failed else ErrorCode.DEADLINE_EXCEEDED
            code = ErrorCode(message.error_code) if message.error_code in ErrorCode.__members__ else code
            self.error = CedarError(code, message.error_message)
            return
        if not self.finish_reason:  # nothing of what follows a stop string is text
            self.finish_reason = message.finish_reason
            self._append(self._output.finish())

    def _append(self, text: str) -> None:
        data = text.encode()
        if len(data) > self._room:
            data = data[: self._room].decode(errors="ignore").encode()
            self._end(FinishReason.LENGTH)
            self._room = len(data)
        self._room -= len(data)
        self._text.append(data.decode())

    def _end(self, reason: FinishReason) -> None:
        self.finish_reason = self.finish_reason or reason
        self.ended_here = True

    def _feed_logprobs(self, message: pb.SequenceTokens) -> None:
        self._cumulative += sum(entry.logprob for entry in message.logprobs)
        if self._reply.logprobs:
            self._logprobs += map(self._entry, message.logprobs)
            self._prompt += [None if entry.absent else self._entry(entry) for entry in message.prompt_logprobs]

    def _entry(self, entry: pb.TokenLogprobs) -> dict[str, Any]:
        return {**self._token(entry), "top": [self._token(top) for top in entry.top]}

    def _token(self, entry: pb.TokenLogprobs | pb.TopLogprob) -> dict[str, Any]:
        # shortest decimal of the float32 that was sent
        return {
            "id": entry.token_id,
            "token": self._tokenizer.token_text(entry.token_id),
            "logprob": float(f"{entry.logprob:.9g}"),
        }

    def has_data(self) -> bool:
        """There is something to send now; without streaming only at the end."""
        return self.ended or (self._reply.stream and bool(self._ids))

    def take(self) -> dict[str, object]:
        """Values of the outputs that change, since the last `take`."""
        values = {
            "text_output": "".join(self._text),
            "output_ids": self._ids,
            "finish_reason": self.finish_reason,
            "logprobs": self._logprobs_json(),
            "cumulative_logprob": self._cumulative if self._reply.cumulative_logprob else 0.0,
            "num_output_tokens": len(self._ids),
            "perf_metrics": _perf_json(self._timing) if self._timing is not None and self._reply.perf_metrics else "",
        }
        self._text, self._ids, self._logprobs, self._prompt = [], [], [], []
        return values

    def _logprobs_json(self) -> str:
        if not self._reply.logprobs:
            return ""
        value: dict[str, Any] = {"tokens": self._logprobs}
        if self._prompt:
            value["prompt"] = self._prompt
        return json.dumps(value, ensure_ascii=False, allow_nan=False)


def empty_values(finish_reason: str = "") -> dict[str, object]:
    """The same outputs of a response without data."""
    return {
        "text_output": "",
        "output_ids": (),
        "finish_reason": finish_reason,
        "logprobs": "",
        "cumulative_logprob": 0.0,
        "num_output_tokens": 0,
        "perf_metrics": "",
    }


def _perf_json(timing: pb.Timing) -> str:
    marks = (timing.arrival_ns, timing.first_scheduled_ns, timing.first_token_ns, timing.last_token_ns)
    seconds = [max(0, end - start) / 1e9 if start and end else 0.0 for start, end in pairwise(marks)]
    names = ("arrival", "first_scheduled", "first_token", "last_token", "queue", "prefill", "decode")
    return json.dumps(dict(zip(names, (*marks, *seconds), strict=True)))
