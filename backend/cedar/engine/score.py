# SPDX-License-Identifier: Apache-2.0
"""Logits of every position of one prompt, through the runner: pools, chunks, a simulated prefix hit, both replay sides."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from cedar.engine.memory import ModelSequence
from cedar.engine.request import DecoderReplay, EncoderReplay
from cedar.engine.runner import ModelRunner
from cedar.engine.work import PrefillWork, StepWork
from cedar.errors import invalid


def score(
    runner: ModelRunner,
    token_ids: Sequence[int],
    *,
    chunk_size: int,
    prefix_hit: int = 0,
    encoder_replay: EncoderReplay = EncoderReplay.BOUNDED,
    decoder_replay: DecoderReplay = DecoderReplay.BOUNDED,
    on_rows: Callable[[int], object] = lambda rows: None,
) -> npt.NDArray[np.float32]:
    """float32 [T, vocab]; NaN for every position that is not computed to the end.

    prefix_hit: tokens [0, prefix_hit) are encoded first, exactly, and then found as a prefix: with encoder-side replay only
    their compressed entries are kept and the last W are run again (a hit of at most W is dropped); without it the whole state
    after them is restored, so their own logits are what is missing. on_rows: called with the rows of every step.
    Raises `CedarError` for input that cannot be scored.
    """
    _validate(runner, token_ids, chunk_size, prefix_hit)
    seq = runner.open_alone(decoder_replay, len(token_ids))
    if seq is None:
        allowed = f"what kv_cache_bytes ({runner.usage().bytes_total}) holds; set CEDAR_KV_CACHE_BYTES"
        raise invalid(
            "--input-ids", f"{len(token_ids)} tokens with decoder replay {decoder_replay} do not fit the cache", allowed
        )
    try:
        if prefix_hit:
            _encode(runner, seq, token_ids[:prefix_hit], chunk_size, None, on_rows)
            if encoder_replay is EncoderReplay.BOUNDED:
                runner.begin_replay(seq, prefix_hit, token_ids[:prefix_hit])
        logits = np.full((len(token_ids), runner.vocab_size), np.nan, np.float32)
        _encode(runner, seq, token_ids, chunk_size, logits, on_rows)
        if decoder_replay is not DecoderReplay.OFF:
            first, kept = runner.kept_logits(seq)
            logits[first:] = kept.cpu().numpy()
        return logits
    finally:
        runner.close(seq)


def _validate(runner: ModelRunner, token_ids: Sequence[int], chunk_size: int, prefix_hit: int) -> None:
    if not token_ids:
        raise invalid("--input-ids", "is empty", "at least one token id")
    if len(token_ids) > runner.max_model_len:
        raise invalid("--input-ids", f"has {len(token_ids)} tokens", f"at most {runner.max_model_len} (max_model_len)")
    outside = [token for token in token_ids if not 0 <= token < runner.vocab_size]
    if outside:
        raise invalid("--input-ids", f"holds {outside[0]}", f"token ids 0 to {runner.vocab_size - 1}")
    if chunk_size < 1:
        raise invalid("--chunk-size", f"is {chunk_size}", "at least 1")
    if not 0 <= prefix_hit < len(token_ids):
        raise invalid("--prefix-hit", f"is {prefix_hit}", f"0 to {len(token_ids) - 1}: the last token is always computed")


def _encode(
    runner: ModelRunner,
    seq: ModelSequence,
    token_ids: Sequence[int],
    chunk_size: int,
    logits: npt.NDArray[np.float32] | None,
    on_rows: Callable[[int], object],
) -> None:
    """Run the chunks from where ``seq`` is to the end of ``token_ids``. ``logits`` None: a prefix, its logits are not wanted."""
    wanted = logits is not None
    for start in range(seq.num_computed, len(token_ids), chunk_size):
        ids = token_ids[start : start + chunk_size]
        last = wanted and start + len(ids) == len(token_ids)
        work = PrefillWork(seq, start, ids, last, all_logits=wanted and seq.mode is DecoderReplay.OFF)
        result = runner.step(StepWork(prefills=[work]))
        for rows in result.prompt_logits.values():
            assert logits is not None
            logits[start : start + len(ids)] = rows.cpu().numpy()
        on_rows(len(ids))
