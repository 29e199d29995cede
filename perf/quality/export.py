# SPDX-License-Identifier: Apache-2.0
"""Write the trained model as a checkpoint of the released layout: FP8, FP4, UE8M0 scales, a tokenizer and a configuration.

python -m perf.quality.export [--state build/quality/conversations/state.pt] [--out build/quality/model]
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import tokenizers
import torch
import typer
from perf.quality.prepare import DIRECTORY
from perf.quality.released import write_weights
from perf.quality.settings import complete_config
from perf.quality.weights import Weights

from cedar.config.model import ModelConfig
from cedar.model.make import write_texts

SHARD_BYTES = 14 << 20


def export(weights: Weights, tokenizer_directory: Path, out: Path) -> int:
    """Make the directory ``out``; returns the bytes of its tensors."""
    tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer_directory / "tokenizer.json"))
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    write_texts(complete_config(tokenizer), tokenizer, out)
    return write_weights(weights, out, shard_bytes=SHARD_BYTES)


def main(
    state: Annotated[Path, typer.Option(help="what perf.quality.train saved")] = DIRECTORY.parent / "conversations" / "state.pt",
    tokenizer: Annotated[Path, typer.Option(help="where its tokenizer.json lies")] = DIRECTORY,
    out: Annotated[Path, typer.Option(help="the checkpoint's directory; replaced")] = DIRECTORY.parent / "model",
) -> None:
    """Quantise and write."""
    trained = tokenizers.Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    weights = Weights(ModelConfig.from_dict(complete_config(trained)))
    weights.load_state_dict(torch.load(state, map_location="cpu", weights_only=True)["weights"])
    size = export(weights, tokenizer, out)
    print(f"{out}: {size / 1e6:.1f} MB of tensors")


if __name__ == "__main__":
    typer.run(main)
