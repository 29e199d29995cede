# SPDX-License-Identifier: Apache-2.0
"""Text that every CPython installation has, and the tokenizer trained on it and on the generated tasks.

The standard library's sources and its documentation topics are under the PSF licence.
"""

from __future__ import annotations

import json
import lzma
import random
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path

import tokenizers
from perf.quality.tasks import TASKS, Draw, conversation
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from cedar.model.make import CONTROL_TOKENS

_SKIPPED = {"test", "tests", "idlelib", "lib2to3", "ensurepip", "pydoc_data", "encodings", "turtledemo", "site-packages"}
_HELD_OUT = 20
"""One file (or documentation topic) in so many is kept for measuring perplexity."""
_SAMPLES = 4000


class Corpus:
    """Named texts in two splits. ``passage`` gives a run of whole lines of the training split as filler."""

    def __init__(self, texts: dict[str, str]) -> None:
        self.texts = texts
        self.train = [text for name, text in texts.items() if not held_out(name)]
        self.held_out = [text for name, text in texts.items() if held_out(name)]

    def passage(self, random: random.Random, characters: int, *, held_out: bool = False) -> str:
        text = random.choice(self.held_out if held_out else self.train)
        start = text.find("\n", random.randrange(max(1, len(text) - characters))) + 1
        return text[start : start + characters].rpartition("\n")[0].strip("\n") or text[:characters].strip("\n")

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(lzma.compress(json.dumps(self.texts).encode()))

    @classmethod
    def load(cls, path: Path) -> Corpus:
        return cls(json.loads(lzma.decompress(path.read_bytes())))

    @classmethod
    def of_this_python(cls) -> Corpus:
        """Sources of the running interpreter's standard library and its documentation topics."""
        root = Path(sysconfig.get_paths()["stdlib"])
        texts = {}
        for path in sorted(root.rglob("*.py")):
            name = path.relative_to(root)
            if not _SKIPPED & set(name.parts) and not name.parts[0].startswith(("config-", "_sysconfigdata")):
                texts[str(name)] = path.read_text(encoding="utf-8")
        from pydoc_data.topics import topics

        texts |= {f"topic:{name}": text for name, text in topics.items()}
        return cls({name: text for name, text in texts.items() if len(text) > 400 and text.isascii()})


def held_out(name: str) -> bool:
    return zlib.crc32(name.encode()) % _HELD_OUT == 0


def train_tokenizer(corpus: Corpus, vocab_size: int) -> tokenizers.Tokenizer:
    """Byte-level BPE whose numbers are single digits: arithmetic and codes are learnt digit by digit."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        show_progress=False,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(_tokenizer_texts(corpus), trainer)
    return tokenizer


def _tokenizer_texts(corpus: Corpus) -> Iterator[str]:
    """The training texts, and as much again of what the tasks say."""
    yield from corpus.train
    draw = Draw("tokenizer", held_out=False, text=corpus.passage)
    for number in range(_SAMPLES):
        for make in TASKS.values():
            if make is conversation:
                continue  # it says what the others say
            item = make(draw, 100 + number % 400)
            yield "\n".join(json.dumps(tool["function"]) for tool in item.tools)
            for turn in item.turns:
                yield f"{turn.user}\n{turn.reasoning}\n{turn.answer}"
