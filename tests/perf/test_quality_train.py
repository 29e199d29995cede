# SPDX-License-Identifier: Apache-2.0
"""Training learns, and a resumed run is the run that was not interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from perf.quality import parts, settings
from perf.quality.data import Rows, Source
from perf.quality.optim import orthogonalised
from perf.quality.prepare import main as prepare
from perf.quality.train import Phase, Plan, Trainer

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 2,
    "head_dim": 64,
    "qk_rope_head_dim": 32,
    "q_lora_rank": 32,
    "o_groups": 1,
    "o_lora_rank": 32,
    "compress_ratios": [0, 2, 2, 1, 1, 1],
    "kv_source_layer_ids": [1, 3],
    "index_source_layer_ids": [1, 3, 5],
    "candidate_source_layer_id": 3,
    "index_n_heads": 2,
    "index_head_dim": 64,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "engram_layer_ids": [1],
    "engram_vocab_size": 500,
    "engram_n_heads": 2,
    "sliding_window": 32,
    "index_topk": 16,
    "candidate_topk_blocks": 4,
}
LENGTH = 256


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("quality") / "data"
    prepare(path)
    return path


@pytest.fixture(scope="module")
def batches(directory: Path) -> list[Rows]:
    """The beginnings of some rows: their first documents are short enough."""
    source = Source(directory, directory, 1, "tasks")
    rows = [source.shard(number, 1000) for number in range(3)]
    return [Rows(*(getattr(r, name)[:4, :LENGTH] for name in ("tokens", "doc_start", "weight"))) for r in rows]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "TEXT", settings.TEXT | SMALL)


def _trainer(directory: Path, plan: Plan) -> Trainer:
    return Trainer(plan, directory, torch.device("cpu"), compiled=False)


@pytest.mark.usefixtures("small")
def test_a_few_steps_do_not_lower_the_loss(directory: Path, batches: list[Rows]) -> None:
    """In every phase: dense, selected, quantised."""
    plan = Plan(30, warmup=3, rate=5e-3, sparse_from=0.3, quantised_from=0.6)
    assert {plan.phase_at(step) for step in range(30)} == {Phase(False, False), Phase(True, False), Phase(True, True)}
    trainer = _trainer(directory, plan)
    losses = [trainer.train_step(batches[0])[0].item() for _ in range(30)]
    assert losses[0] == pytest.approx(np.log(trainer.model.config.vocab_size), abs=0.1)
    assert losses[8] < losses[0] - 1
    assert losses[17] < losses[8] - 0.2
    assert losses[29] < losses[17] - 0.1


@pytest.mark.usefixtures("small")
def test_a_resumed_run_goes_another_way(directory: Path, batches: list[Rows], tmp_path: Path) -> None:
    plan = Plan(6, warmup=2)
    whole, part = _trainer(directory, plan), _trainer(directory, plan)
    for step in range(3):
        whole.train_step(batches[step % 3])
        part.train_step(batches[step % 3])
    part.save(tmp_path / "state.pt")
    resumed = _trainer(directory, plan)
    resumed.load(tmp_path / "state.pt")
    assert resumed.step == 3
    for step in range(3, 6):
        expected, found = whole.train_step(batches[step % 3]), resumed.train_step(batches[step % 3])
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.usefixtures("small")
def test_a_state_of_another_plan_is_gone_on_with(directory: Path, tmp_path: Path) -> None:
    _trainer(directory, Plan(6)).save(tmp_path / "state.pt")
    with pytest.raises(SystemExit, match="another plan"):
        _trainer(directory, Plan(7)).load(tmp_path / "state.pt")


@pytest.mark.usefixtures("small")
def test_a_parameter_is_never_moved(directory: Path, batches: list[Rows]) -> None:
    """Every trained tensor gets a gradient: none is left out of the forward or of the optimiser."""
    trainer = _trainer(directory, Plan(4, warmup=1))
    before = {name: value.detach().clone() for name, value in trainer.model.weights.named()}
    bias = trainer.model.weights("layers.0.ffn.gate.bias").clone()
    trainer.train_step(batches[0])
    same = [name for name, value in trainer.model.weights.named() if torch.equal(value.detach(), before[name])]
    assert same == []
    assert not torch.equal(trainer.model.weights("layers.0.ffn.gate.bias"), bias)


def test_the_rate_does_not_rise_stay_and_fall() -> None:
    plan = Plan(1000, rate=1.0, warmup=100, decay_from=0.5)
    assert plan.rate_at(0) == pytest.approx(0.01)
    assert plan.rate_at(99) == plan.rate_at(400) == pytest.approx(1.0)
    assert plan.rate_at(750) == pytest.approx(0.51)
    assert 0.01 < plan.rate_at(999) < 0.03


def test_orthogonalised_matrices_keep_their_singular_values() -> None:
    random = torch.Generator().manual_seed(0)
    for shape in ((3, 32, 64), (2, 64, 16)):
        values = torch.linalg.svdvals(orthogonalised(torch.randn(shape, generator=random)))
        assert values.min() > 0.3
        assert values.max() < 1.3


def test_rows_that_attend_to_no_entry_teach_the_indexer() -> None:
    """A row counts by its attention to entries: one with a thousandth of another's changes the loss by about as much."""
    scores = torch.tensor([[[4.0, 0.0, 0.0], [0.0, 0.0, 4.0]]])
    much, little = torch.tensor([1.0, 0.0, 0.0]), torch.tensor([1e-3, 0.0, 0.0])
    right = parts.index_loss(scores[:, :1], much[None, None])
    both = parts.index_loss(scores, torch.stack([much, little])[None])
    wrong = parts.index_loss(scores[:, 1:], little[None, None])
    assert wrong > right + 3
    torch.testing.assert_close(both, (right + 1e-3 * wrong) / (1 + 1e-3))
