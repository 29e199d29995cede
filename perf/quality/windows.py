# SPDX-License-Identifier: Apache-2.0
"""What bounded replay changes inside: how far the streams of each layer are from those of the full run, and what that costs in
perplexity, by distance from the first row that was run again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import exp
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from cedar.engine.request import DecoderReplay, EncoderReplay
from cedar.engine.runner import ModelRunner
from cedar.engine.score import score

BUCKETS = (0, 1, 8, 16, 32, 64, 96, 128, 192, 256, 512)
"""Distances from the replay start where a bucket begins; the last is open."""
Float = npt.NDArray[np.float64]


class Windows:
    """Two runs over each text: in full, and with one side bounded."""

    def __init__(self, runner: ModelRunner, chunk: int) -> None:
        self._runner, self._chunk = runner, chunk
        self._window, self._cut = runner.config.sliding_window, runner.config.cut

    def measure(self, texts: Sequence[Sequence[int]], hit: int, done: Callable[[], object] = lambda: None) -> dict[str, Any]:
        """texts: token ids of equal length above hit + W; hit: tokens of the simulated prefix hit."""
        sides: dict[str, list[tuple[int, Float, Float, Float]]] = {"encoder": [], "decoder": []}
        for text in texts:
            full, exact = self._score(text, 0, DecoderReplay.OFF)
            for side, prefix, decoder, start in (
                ("encoder", hit, DecoderReplay.OFF, hit - self._window),
                ("decoder", 0, DecoderReplay.BOUNDED, len(text) - self._window),
            ):
                logits, streams = self._score(text, prefix, decoder)
                errors = [_relative(exact[layer], seen, start) for layer, seen in streams.items()]
                longest = max(map(len, errors))
                stacked = np.array([np.pad(e, (longest - len(e), 0), constant_values=0.0) for e in errors])
                sides[side].append((start, _losses(full, text)[start:], _losses(logits, text)[start:], stacked))
            done()
        return {side: self._summary(side, runs) for side, runs in sides.items()}

    def _score(self, text: Sequence[int], prefix: int, decoder: DecoderReplay) -> tuple[npt.NDArray[np.float32], dict[int, Any]]:
        with _recorded(self._runner) as streams:
            logits = score(
                self._runner,
                text,
                chunk_size=self._chunk,
                prefix_hit=prefix,
                encoder_replay=EncoderReplay.BOUNDED,
                decoder_replay=decoder,
            )
        return logits, {layer: torch.cat(rows) for layer, rows in streams.items() if rows}

    def _summary(self, side: str, runs: list[tuple[int, Float, Float, Float]]) -> dict[str, Any]:
        full, bounded = (np.array([run[index] for run in runs]) for index in (1, 2))
        error = np.mean([run[3] for run in runs], axis=0)
        layers = range(self._cut) if side == "encoder" else range(self._cut, len(error))
        buckets = []
        for first, last in zip(BUCKETS, (*BUCKETS[1:], None), strict=True):
            part = slice(first, last)
            here = ~np.isnan(full[:, part]) & ~np.isnan(bounded[:, part])
            if not here.any():
                continue
            buckets.append(
                {
                    "from": first,
                    "tokens": int(here.sum()),
                    "perplexity_full": round(exp(full[:, part][here].mean()), 3),
                    "perplexity_bounded": round(exp(bounded[:, part][here].mean()), 3),
                    "loss_increase": round(float((bounded[:, part] - full[:, part])[here].mean()), 5),
                }
            )
        return {
            "texts": len(runs),
            "perplexity": buckets,
            "relative_error": {str(layer): [round(float(v), 6) for v in _thinned(error[layer])] for layer in layers},
        }


def _thinned(values: Float) -> Float:
    """Means of the distances' buckets."""
    edges = [edge for edge in BUCKETS if edge < len(values)]
    return np.array([values[a:b].mean() for a, b in zip(edges, (*edges[1:], len(values)), strict=True)])


def _losses(logits: npt.NDArray[np.float32], text: Sequence[int]) -> Float:
    """-log p of each next token by the row that predicts it; NaN where the row was not computed or nothing follows."""
    wide = logits[:-1].astype(np.float64)
    peak = wide.max(-1, keepdims=True)
    norm = np.log(np.exp(wide - peak).sum(-1)) + peak[:, 0]
    losses: Float = norm - wide[np.arange(len(wide)), np.asarray(text[1:])]
    return np.append(losses, np.nan)


def _relative(full: torch.Tensor, seen: torch.Tensor, start: int) -> Float:
    """||seen - full|| / ||full|| of the rows from ``start`` on, which are the last of either."""
    rows = min(seen.shape[0], full.shape[0] - start)
    a, b = full[-rows:].flatten(1).double(), seen[-rows:].flatten(1).double()
    found: Float = ((b - a).norm(dim=1) / a.norm(dim=1)).numpy()
    return found


@contextmanager
def _recorded(runner: ModelRunner) -> Iterator[dict[int, list[torch.Tensor]]]:
    """The streams that each layer gives, in the order of its rows."""
    streams: dict[int, list[torch.Tensor]] = {layer: [] for layer in range(runner.config.num_hidden_layers)}

    def keep(layer: int) -> Callable[..., None]:
        return lambda module, inputs, output: streams[layer].append(output.settle().streams.float().cpu())

    hooks = [block.register_forward_hook(keep(layer)) for layer, block in enumerate(runner.model.layers)]
    try:
        yield streams
    finally:
        for hook in hooks:
            hook.remove()
