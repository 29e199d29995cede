# SPDX-License-Identifier: Apache-2.0
"""The gate and the experts against the independent implementation; grouping rows changes nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from cedar.model.checkpoint import CheckpointReader
from cedar.model.embedded import embedded_model_dir
from cedar.model.moe import Gate, MoE
from cedar.ops.moe import swiglu
from cedar.ops.quant import fq8

NAMES = ["tiny-a", "tiny-b"]


def unit(golden: Path, name: str, key: str) -> Tensor:
    return torch.from_numpy(np.load(golden / name / "units_layers.npz")[key])


def moe(golden: Path, name: str, dtype: torch.dtype = torch.float32, *, act_quant: bool = False) -> MoE:
    reader = CheckpointReader(golden / name / "checkpoint")
    module = MoE(reader.config, dtype, act_quant=act_quant)
    module.load(reader.read, "layers.3.ffn")
    return module


def shared(module: MoE, x: Tensor) -> Tensor:
    """The shared expert alone."""
    return module.shared_w2(swiglu(module.shared_w13(x), module.limit).to(x.dtype))


def one_row_at_a_time(module: MoE, x: Tensor) -> Tensor:
    """The formula without grouping: every chosen expert of every row by itself."""
    ids, weights = module.gate(x)
    rows = []
    for row, experts, shares in zip(x, ids.tolist(), weights, strict=True):
        source = fq8(row) if module.act_quant else row
        total = torch.zeros(x.shape[1])
        for expert, share in zip(experts, shares, strict=True):
            inner = (swiglu(module.w13[expert] @ source, module.limit) * share).to(x.dtype)
            total += (module.w2[expert] @ (fq8(inner) if module.act_quant else inner)).float()
        rows.append(total)
    return (torch.stack(rows) + shared(module, x)).to(x.dtype)


@pytest.mark.parametrize("name", NAMES)
def test_the_gate_chooses_and_weighs_as_the_golden_one(golden: Path, name: str) -> None:
    ids, weights = moe(golden, name).gate(unit(golden, name, "moe_in"))
    assert torch.equal(ids.int(), unit(golden, name, "gate_indices_by_score"))
    ascending = ids.argsort(-1)
    assert torch.equal(ids.gather(1, ascending).int(), unit(golden, name, "gate_indices"))
    torch.testing.assert_close(weights.gather(1, ascending), unit(golden, name, "gate_weights"), atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_image_tokens_are_routed_by_their_own_bias(golden: Path, name: str) -> None:
    module, x = moe(golden, name), unit(golden, name, "moe_in")
    image = torch.arange(len(x)) % 2 == 0
    ids, weights = module.gate(x, image)
    text_ids, text_weights = module.gate(x)
    ascending = ids.argsort(-1)
    assert torch.equal(ids.gather(1, ascending).int()[image], unit(golden, name, "gate_vl_indices")[image])
    torch.testing.assert_close(
        weights.gather(1, ascending)[image], unit(golden, name, "gate_vl_weights")[image], atol=1e-6, rtol=0
    )
    assert torch.equal(ids[~image], text_ids[~image])
    assert torch.equal(weights[~image], text_weights[~image])


@pytest.mark.parametrize("name", NAMES)
def test_outputs_equal_the_golden_ones(golden: Path, name: str) -> None:
    module, x = moe(golden, name), unit(golden, name, "moe_in")
    for value, key in ((module(x), "moe_out"), (shared(module, x), "shared_out")):
        expected = unit(golden, name, key)
        assert (value - expected).norm() / expected.norm() < 1e-6


def test_ties_go_to_the_lowest_expert(golden: Path) -> None:
    gate = Gate(CheckpointReader(golden / "tiny-a" / "checkpoint").config, experts=8, top_k=3)
    for parameter in (gate.weight, gate.bias, gate.bias_vl):
        parameter.zero_()
    gate.bias[5] = 1.0
    ids, weights = gate(torch.randn(4, 64))
    assert ids.tolist() == [[5, 0, 1]] * 4
    torch.testing.assert_close(weights, torch.full((4, 3), 0.5))


@pytest.mark.parametrize("act_quant", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 7, 24])
def test_grouping_rows_by_expert_is_the_formula(golden: Path, rows: int, dtype: torch.dtype, act_quant: bool) -> None:
    module = moe(golden, "tiny-b", dtype, act_quant=act_quant)
    x = unit(golden, "tiny-b", "moe_in")[:rows].to(dtype)
    expected = one_row_at_a_time(module, x).float()
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-6
    assert (module(x).float() - expected).norm() / expected.norm() < tolerance


def test_activation_quantisation_changes_the_experts_and_not_the_gate(golden: Path) -> None:
    x = unit(golden, "tiny-a", "moe_in")
    exact, quantised = moe(golden, "tiny-a"), moe(golden, "tiny-a", act_quant=True)
    assert torch.equal(exact.gate(x)[1], quantised.gate(x)[1])
    distance = ((exact(x) - quantised(x)).norm() / exact(x).norm()).item()
    assert 1e-3 < distance < 1e-1


def test_a_row_keeps_its_value_in_any_batch(golden: Path) -> None:
    module, x = moe(golden, "tiny-a"), unit(golden, "tiny-a", "moe_in")
    together = module(x)
    for row in range(len(x)):
        torch.testing.assert_close(module(x[row : row + 1])[0], together[row], atol=1e-5, rtol=1e-5)


def test_swiglu_clamps_the_gate_above_and_the_value_on_both_sides() -> None:
    hidden = torch.tensor([[-50.0, 50.0, 1.0, 1.0, 9.0, 9.0, -9.0, 9.0]])
    silu = torch.nn.functional.silu(torch.tensor([-50.0, 2.0, 1.0, 1.0]))
    torch.testing.assert_close(swiglu(hidden, 2.0), (silu * torch.tensor([2.0, 2.0, -2.0, 2.0]))[None])


@pytest.mark.parametrize("act_quant", [False, True])
def test_weights_that_stay_packed_give_other_results(act_quant: bool) -> None:
    """The embedded model's experts do not fill a tile: 96 columns of 128."""
    reader = CheckpointReader(embedded_model_dir())
    packed, plain = (
        MoE(reader.config, torch.bfloat16, act_quant=act_quant, weight_dtype=weight_dtype)
        for weight_dtype in (torch.float8_e4m3fn, torch.bfloat16)
    )
    assert packed.w13.shape[1] > plain.w13.shape[1]
    for module in (packed, plain):
        module.load(reader.read, "layers.3.ffn")
    x = torch.randn(21, reader.config.hidden_size, generator=torch.Generator().manual_seed(4)).bfloat16()
    assert torch.equal(packed(x), plain(x))
    assert packed.w13.nbytes + packed.w2.nbytes < 0.4 * (plain.w13.nbytes + plain.w2.nbytes)
