# SPDX-License-Identifier: Apache-2.0
"""Step 1: validates a request, merges its settings, makes token ids of its prompt; also where cancel requests end."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from cedar.config.engine import EngineConfig
from cedar.engine.request import FinishReason
from cedar.errors import CedarError
from cedar.text.chat import ChatDefaults, encode_messages
from cedar.text.tokenizer import Tokenizer, load_tokenizer
from cedar.triton import responses
from cedar.triton.checkpoint import model_directory
from cedar.triton.envelope import Envelope
from cedar.triton.link import EngineLink, end_with_server
from cedar.triton.logs import start_logging
from cedar.triton.request import Cancel, Limits, parse_request
from cedar.triton.tensors import STEPS

OUTPUTS = STEPS[0].outputs


class Prompts:
    """The checkpoint's tokenizer as the parser wants it."""

    def __init__(self, tokenizer: Tokenizer, chat: ChatDefaults) -> None:
        self._tokenizer = tokenizer
        self._chat = chat

    def encode_text(self, text: str) -> list[int]:
        """BOS and the text, control tokens included."""
        return self._tokenizer.encode_prompt(text)

    def encode_messages(self, messages: str) -> list[int]:
        """A chat, encoded as the release does."""
        return encode_messages(messages, self._tokenizer, self._chat).input_ids


class Tokenize:
    """Non-decoupled. Never waits for the engine, but for the short call that cancels a request."""

    def initialize(self, args: dict[str, str]) -> None:
        """Returns when the engine accepts requests."""
        end_with_server()
        config = EngineConfig.load()
        start_logging(config, args["model_name"])
        model = model_directory(config)
        tokenizer = load_tokenizer(model)
        tokenizer.encode_pieces([])  # builds what the first chat request would otherwise wait for
        self._prompts = Prompts(tokenizer, ChatDefaults.load(model))
        self._link = EngineLink(config)
        status = self._link.client.status()
        self._limits = Limits(
            max_model_len=status.max_model_len,
            vocab_size=status.vocab_size,
            image_token_id=image_token_id(model),
            max_prompt_bytes=config.max_prompt_bytes,
            default_timeout_ms=config.default_timeout_ms,
            longest_token=tokenizer.longest_token,
        )

    def execute(self, requests: list[Any]) -> list[Any]:
        """One response or error per request."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        try:
            parsed = parse_request(
                responses.inputs(request),
                request.parameters(),
                request.timeout(),
                self._prompts,
                self._limits,
                time.time_ns(),
            )
            if isinstance(parsed, Cancel):
                ids, envelope = np.empty(0, np.int32), self._cancel(parsed.key)
            else:
                ids, envelope = parsed.input_ids, parsed.envelope
        except CedarError as error:
            return responses.failure(error)
        except Exception:
            return responses.failure(responses.internal(request.request_id() or "(no id)", "its inputs were read"))
        return responses.response(OUTPUTS, {"_input_ids": ids, "_request": envelope.model_dump_json(exclude_defaults=True)})

    def _cancel(self, key: str) -> Envelope:
        try:
            found = self._link.client.abort(key=key)
        except CedarError:
            self._link.recover()
            raise
        return Envelope(key=key, ended=FinishReason.CANCELLED if found else "not_found")

    def finalize(self) -> None:
        """The server unloads the model."""
        self._link.close()


def image_token_id(model: Path) -> int:
    """The image token of the checkpoint's config.json, -1 if it has none."""
    config = json.loads((model / "config.json").read_text())
    return int(config.get("image_token_id", -1))
