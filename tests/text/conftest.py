# SPDX-License-Identifier: Apache-2.0
"""Two tokenizers: a golden one without chat tokens, and the same with the release's control tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cedar.text.tokenizer import Tokenizer, load_tokenizer

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
CONTROLS = {
    BOS: True,
    EOS: True,
    "<｜System｜>": False,
    "<｜User｜>": False,
    "<｜Assistant｜>": False,
    "<｜latest_reminder｜>": True,
    "<｜deepseek_image｜>": True,
    "<think>": False,
    "</think>": True,
    "｜DSML｜": True,
}
"""Spelling -> flagged special: the flags vary on purpose, what is text must not depend on them."""


@pytest.fixture(scope="session")
def base_tokenizer(golden: Path) -> Tokenizer:
    return load_tokenizer(golden / "tiny-a" / "checkpoint")


@pytest.fixture(scope="session")
def chat_json(golden: Path) -> str:
    spec = json.loads((golden / "tiny-a" / "checkpoint" / "tokenizer.json").read_text())
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    for number, (token, special) in enumerate(CONTROLS.items()):
        spec["added_tokens"].append({"id": 600 + number, "content": token, "special": special, **plain})
    return json.dumps(spec)


@pytest.fixture(scope="session")
def tokenizer(chat_json: str) -> Tokenizer:
    return Tokenizer(chat_json, BOS, EOS)
