# SPDX-License-Identifier: Apache-2.0
"""Random checkpoints in exactly the released layout, of any configuration, with a working tokenizer."""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from cedar.config.model import ModelConfig, bucket_primes
from cedar.errors import invalid
from cedar.model.checkpoint import Progress
from cedar.model.engram import TokenMap
from cedar.model.random_weights import write_weights

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
SYSTEM, IMAGE = "<｜System｜>", "<｜deepseek_image｜>"
CONTROL_TOKENS = (
    *(BOS, EOS, PAD, SYSTEM, "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "｜DSML｜", "<｜latest_reminder｜>", IMAGE),
)
"""The released tokens that prompts are built from, by their spelling; here their ids are 0, 1, 2, …"""

_PLACEHOLDER = "<｜place▁holder▁no▁{}｜>"
_LEAST_VOCAB = len(CONTROL_TOKENS) + 256


def make_checkpoint(
    config: dict[str, Any],
    out: Path | str,
    seed: int = 0,
    *,
    shards: int | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> ModelConfig:
    """Write a random checkpoint (text model and drafter, no vision tower) to the directory ``out``; returns its config.

    config: content of a released-layout ``config.json`` (`cedar.config.presets.preset`). What follows from the tokenizer
    is set here: special token ids, ``engram_compressed_vocab_size`` and ``engram_num_embeddings``.
    shards: number of files, at most; None: as few as keep each under 8 GiB. force: replace a checkpoint that is there.
    The directory appears whole: it is made beside ``out`` and renamed. Raises `CedarError` on a config that is not valid.
    """
    if shards is not None and shards < 1:
        raise invalid("shards", f"is {shards}", "1 or more")
    text = config.get("text_config")
    vocab = text.get("vocab_size") if isinstance(text, dict) else None
    if not isinstance(vocab, int) or vocab < _LEAST_VOCAB:
        raise invalid("vocab_size", f"is {vocab!r}", f"at least {_LEAST_VOCAB}: the control tokens and all bytes")
    tokenizer = make_tokenizer(vocab)
    config = with_tokenizer(config, tokenizer)
    parsed = ModelConfig.from_dict(config)
    with _appearing_whole(Path(out), force) as staging:
        write_weights(parsed, staging, seed, silent=list(tokenizer.get_added_tokens_decoder()), shards=shards, progress=progress)
        write_texts(config, tokenizer, staging)
    return parsed


@contextmanager
def _appearing_whole(out: Path, force: bool) -> Iterator[Path]:
    """A directory beside ``out`` that becomes ``out`` at the end, or vanishes when the block fails."""
    taken = out.exists() and (not out.is_dir() or any(out.iterdir()))
    if taken and not force:
        raise invalid("out", f"{out} exists", "a new directory, or --force to replace a checkpoint")
    if taken and not (out / "config.json").is_file():
        raise invalid("out", f"{out} is not a checkpoint", "a new directory, or a checkpoint to replace")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as scratch:
        staging = Path(scratch) / "new"
        staging.mkdir()
        yield staging
        if taken:
            out.rename(Path(scratch) / "old")
        staging.rename(out)


def make_tokenizer(vocab_size: int) -> Tokenizer:
    """Byte-level BPE of exactly ``vocab_size`` tokens, trained on the text that Cedar ships.

    Control tokens come first. Every byte is a token, so any text comes back from decode(encode(text)). Ids that the text
    gives no merge for are placeholder tokens, as in the release: no id is without a token, and they decode to nothing.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=1,
        show_progress=False,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    corpus = resources.files("cedar.text").joinpath("data/corpus.txt").read_text(encoding="utf-8")
    tokenizer.train_from_iterator(corpus.splitlines(keepends=True), trainer)
    missing = range(tokenizer.get_vocab_size(), vocab_size)
    tokenizer.add_special_tokens(
        [AddedToken(_PLACEHOLDER.format(i), special=True, normalized=False) for i in range(len(missing))]
    )
    return tokenizer


def with_tokenizer(config: dict[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """A copy of a ``config.json`` content with what follows from the tokenizer: special ids, the sizes of the Engram tables."""
    config = copy.deepcopy(config)
    text = config["text_config"]
    names = (("bos_token_id", BOS), ("eos_token_id", EOS), ("pad_token_id", PAD), ("image_token_id", IMAGE))
    for field, token in names:
        config[field] = tokenizer.token_to_id(token)
        text.pop(field, None)
    text["engram_pad_token_id"] = config["pad_token_id"]
    text["engram_compressed_vocab_size"] = TokenMap(tokenizer).size
    if text.get("num_nextn_predict_layers"):
        text["dspark_noise_token_id"] = tokenizer.token_to_id(SYSTEM)
    sizes = [text.get(name) for name in ("engram_max_ngram_size", "engram_n_heads", "engram_vocab_size")]
    layers = text.get("engram_layer_ids")
    if isinstance(layers, list) and all(isinstance(size, int) and 0 < size < 1 << 31 for size in sizes) and sizes[1] <= 64:
        text["engram_num_embeddings"] = [sum(primes) for primes in bucket_primes(len(layers), *sizes)]
    return config


def write_texts(config: dict[str, Any], tokenizer: Tokenizer, out: Path) -> None:
    """Write a checkpoint's JSON files, but for the index of its weights, into the directory ``out``."""
    special = {
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
    }
    length = {"model_max_length": config["text_config"]["max_position_embeddings"], "tokenizer_class": "PreTrainedTokenizerFast"}
    sampling = {"bos_token_id": config["bos_token_id"], "eos_token_id": config["eos_token_id"], "do_sample": True}
    files = {"tokenizer_config.json": {**special, **length}, "generation_config.json": sampling, "config.json": config}
    for name, content in files.items():
        (out / name).write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
    tokenizer.save(str(out / "tokenizer.json"))
