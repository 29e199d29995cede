# SPDX-License-Identifier: Apache-2.0
"""The checkpoint's byte-level BPE tokenizer, behind the few operations that Cedar needs.

A prompt has two kinds of characters: control tokens that we put there, and text that somebody wrote. `Tokenizer.encode`
reads control tokens out of its text, as raw prompts need. `Tokenizer.encode_pieces` keeps the two apart, so that a control
token's spelling inside a chat message stays text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from cedar.errors import invalid

IMAGE_TOKEN = "<｜deepseek_image｜>"
STRUCTURE_TOKENS = frozenset({"<think>", "</think>", "｜DSML｜"})
"""Never skipped in decoded text, whatever tokenizer.json flags them as: reasoning and tool calls are parsed from them."""


class Piece(NamedTuple):
    """Part of a prompt: the name of one control token, or text in which no control token is recognised."""

    text: str
    control: bool = False


class Tokenizer:
    """Text to token ids and back. Immutable and thread-safe once built."""

    def __init__(self, tokenizer_json: str, bos_token: str, eos_token: str) -> None:
        """``tokenizer_json``: the file's text. Raises `cedar.errors.CedarError` when it is not byte-level or lacks bos or eos."""
        try:
            self._backend = tokenizers.Tokenizer.from_str(tokenizer_json)
            decoder = (json.loads(tokenizer_json).get("decoder") or {}).get("type")
        except Exception as error:  # the library raises plain Exception for every malformed file
            raise invalid("tokenizer.json", f"cannot be read ({error})", "a file of the tokenizers library") from error
        if decoder != "ByteLevel":
            raise invalid("tokenizer.json", f"its decoder is {decoder}", "ByteLevel, as in the release")
        self._backend.no_truncation()
        self._backend.no_padding()
        self._skipped = {
            token_id
            for token_id, token in self._backend.get_added_tokens_decoder().items()
            if token.special and token.content not in STRUCTURE_TOKENS
        }
        self._bytes: dict[int, bytes] = {}
        self.bos_token = bos_token
        self.eos_token = eos_token
        self.bos_id = self.token_id(bos_token, "tokenizer_config.json: bos_token")
        self.eos_id = self.token_id(eos_token, "tokenizer_config.json: eos_token")

    def __len__(self) -> int:
        """Number of tokens with a spelling; the model's ``vocab_size`` may be larger."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    def token_id(self, token: str, field: str = "messages") -> int:
        """The id of a token by its exact spelling; INVALID_ARGUMENT on ``field`` when the tokenizer has no such token."""
        token_id = self._backend.token_to_id(token)
        if token_id is None:
            raise invalid(field, f"this checkpoint's tokenizer has no {token!r}", "a tokenizer with that token")
        return int(token_id)

    def encode(self, text: str, field: str = "text_input") -> list[int]:
        """Token ids of ``text`` as it is: spellings of control tokens become those tokens, and nothing is added."""
        return _encode(self._backend, text, field)

    def encode_prompt(self, text: str, field: str = "text_input") -> list[int]:
        """A raw prompt: `encode`, after a bos that is added unless the text starts with its own."""
        if IMAGE_TOKEN in text:
            raise invalid(field, f"contains {IMAGE_TOKEN}", "text; this server has no vision tower")
        ids = self.encode(text, field)
        return ids if ids[:1] == [self.bos_id] else [self.bos_id, *ids]

    def encode_pieces(self, pieces: Iterable[Piece]) -> list[int]:
        """Token ids of a prompt in pieces; neighbouring texts are joined first, so merges cross their seams."""
        ids: list[int] = []
        text: list[str] = []
        for piece in pieces:
            if not piece.control:
                text.append(piece.text)
                continue
            ids += _encode(self._literal, "".join(text), "messages")
            text.clear()
            ids.append(self.token_id(piece.text))
        return ids + _encode(self._literal, "".join(text), "messages")

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids`` without special tokens; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to the text: nothing for a special token, and for an id that has no spelling."""
        cached = self._bytes.get(token_id)
        if cached is None:
            cached = b"" if token_id in self._skipped else _spelling(self._backend.id_to_token(token_id))
            self._bytes[token_id] = cached
        return cached

    @cached_property
    def longest_token(self) -> int:
        """Bytes of the longest spelling, special tokens included: n tokens stand for at most n times as many bytes of text."""
        return max(len(_spelling(self._backend.id_to_token(token_id))) for token_id in range(len(self)))

    def token_text(self, token_id: int) -> str:
        """A token's own spelling, special tokens included, for people to read (log-probability tables)."""
        return _spelling(self._backend.id_to_token(token_id)).decode("utf-8", "replace")

    @cached_property
    def _literal(self) -> tokenizers.Tokenizer:
        """The same tokenizer without its added tokens: no text, however spelled, can become one of them."""
        spec: dict[str, Any] = json.loads(self._backend.to_str())
        for token in spec["added_tokens"]:
            spec["model"]["vocab"].pop(token["content"], None)
        spec["added_tokens"] = []
        spec["post_processor"] = None
        return tokenizers.Tokenizer.from_str(json.dumps(spec))


def load_tokenizer(directory: Path | str) -> Tokenizer:
    """The tokenizer of a checkpoint directory (``tokenizer.json``, ``tokenizer_config.json``)."""
    texts = []
    for name in ("tokenizer.json", "tokenizer_config.json"):
        try:
            texts.append((Path(directory) / name).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise invalid("model", f"cannot read {name} ({error})", "a checkpoint with its tokenizer") from error
    try:
        config = json.loads(texts[1])
    except json.JSONDecodeError as error:
        raise invalid("tokenizer_config.json", f"not valid JSON ({error})", "a JSON object") from error
    return Tokenizer(texts[0], _special(config, "bos_token"), _special(config, "eos_token"))


def _special(config: Any, name: str) -> str:
    """A token of tokenizer_config.json: its spelling, or an object that holds it as ``content``."""
    value = config.get(name) if isinstance(config, dict) else None
    value = value.get("content") if isinstance(value, dict) else value
    if not isinstance(value, str) or not value:
        raise invalid(f"tokenizer_config.json: {name}", f"is {value!r}", "the spelling of a token")
    return value


def _encode(backend: tokenizers.Tokenizer, text: str, field: str) -> list[int]:
    try:
        return list(backend.encode(text, add_special_tokens=False).ids) if text else []
    except TypeError as error:  # how the library refuses a str with lone surrogates
        raise invalid(field, "holds half of a surrogate pair", "well-formed Unicode") from error


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE spells each byte as one printable character (the GPT-2 alphabet): the inverse of that map."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _spelling(token: str | None) -> bytes:
    """A vocabulary entry's bytes. One with a character outside the alphabet (added tokens) stands for its own UTF-8."""
    if token is None:
        return b""
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode()
