# SPDX-License-Identifier: Apache-2.0
"""Text and tokenizer for `perf.quality.train`: python -m perf.quality.prepare [directory]"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from perf.quality.corpus import Corpus, train_tokenizer
from perf.quality.settings import model_config

from cedar.model.make import BOS, EOS, PAD

DIRECTORY = Path(__file__).resolve().parents[2] / "build" / "quality" / "data"


def main(directory: Path = DIRECTORY) -> None:
    """Writes ``text.json.xz``, ``tokenizer.json`` and ``tokenizer_config.json``."""
    corpus = Corpus.of_this_python()
    corpus.save(directory / "text.json.xz")
    tokenizer = train_tokenizer(corpus, model_config()["text_config"]["vocab_size"])
    tokenizer.save(str(directory / "tokenizer.json"))
    special = {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD, "add_bos_token": False}
    (directory / "tokenizer_config.json").write_text(json.dumps(special, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
    print(f"{directory}: {len(corpus.train)} texts, {len(corpus.held_out)} held out, {tokenizer.get_vocab_size()} tokens")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
