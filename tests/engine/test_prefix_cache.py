# SPDX-License-Identifier: Apache-2.0
"""Prefix hits through the page pool against the golden sets: what was found, what is run again, and what comes out."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from cedar.cache.layout import GlobalRecords, IndexKeyRecords, WindowRecords
from cedar.cache.prefix import TokenChain
from cedar.cache.records import RecordFormat, RecordPool
from cedar.engine.memory import ModelSequence
from cedar.engine.request import DecoderReplay, EncoderReplay
from cedar.engine.runner import ModelRunner
from cedar.engine.work import Prompt
from golden_support import case_arrays, decode, load_runner, prefill, stored_rows, tail

FORMS = {
    ("enc", EncoderReplay.BOUNDED, DecoderReplay.OFF),
    ("enc_dec_after_source", EncoderReplay.BOUNDED, DecoderReplay.BOUNDED),
    ("exact", EncoderReplay.OFF, DecoderReplay.OFF),
    ("dec_after_source", EncoderReplay.OFF, DecoderReplay.BOUNDED),
}


@pytest.fixture(params=["tiny-a", "tiny-b"])
def name(request: pytest.FixtureRequest) -> Iterator[str]:
    load_runner(request.param, "fp32_noquant").clear_cache()
    yield request.param
    runner = load_runner(request.param, "fp32_noquant")
    assert runner.usage().bytes_used == 0
    runner.clear_cache()
    assert runner.usage().bytes_cached == 0


def prompt(
    ids: list[int],
    encoder: EncoderReplay = EncoderReplay.BOUNDED,
    decoder: DecoderReplay = DecoderReplay.BOUNDED,
    *,
    salt: str = "",
    reuse: bool = True,
) -> Prompt:
    return Prompt(TokenChain(ids, salt, 16), encoder, decoder, reuse)


def opened(runner: ModelRunner, wanted: Prompt) -> ModelSequence:
    seq = runner.open(wanted, len(wanted.chain.token_ids))
    assert seq is not None
    return seq


def leave_behind(runner: ModelRunner, wanted: Prompt) -> None:
    """Encode a prompt and close it; what it published stays."""
    seq = opened(runner, wanted)
    prefill(runner, seq, wanted.chain.token_ids, 50)
    runner.close(seq)


@pytest.mark.parametrize("size", [None, 7, 64, 129])
@pytest.mark.parametrize(("form", "encoder", "decoder"), sorted(FORMS))
def test_a_hit_differs_from_the_reference(
    name: str, form: str, encoder: EncoderReplay, decoder: DecoderReplay, size: int | None
) -> None:
    check_hit(load_runner(name, "fp32_noquant"), name, form, encoder, decoder, size)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@pytest.mark.parametrize(("form", "encoder", "decoder"), sorted(FORMS))
def test_a_hit_on_a_gpu_differs_from_the_reference(form: str, encoder: EncoderReplay, decoder: DecoderReplay) -> None:
    for name in ("tiny-a", "tiny-b"):
        runner = load_runner(name, "fp32_noquant", device="cuda")
        check_hit(runner, name, form, encoder, decoder, 64)
        runner.clear_cache()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("record", [WindowRecords(512), GlobalRecords(512), IndexKeyRecords(128)])
def test_records_packed_on_a_gpu_are_other_bytes(record: RecordFormat, dtype: torch.dtype) -> None:
    """A GPU's divisions and roundings must be those of the CPU: pages may be read by another machine."""
    values = (torch.randn(4096, record.dim) * torch.randn(4096, 1).mul(6).exp()).to(dtype)
    values[:8] = 0.0
    packed = record.encode(values)
    assert torch.equal(record.encode(values.cuda()).cpu(), packed)
    assert torch.equal(record.decode(packed.cuda()).cpu(), record.decode(packed))
    pools = [RecordPool.allocate(record, 8192, torch.device(device)) for device in ("cpu", "cuda")]
    rows = 1 + torch.randperm(8191)[:4096]
    for pool in pools:
        pool.store(packed.to(pool.rows.device), rows.to(pool.rows.device))
    assert torch.equal(pools[0].rows, pools[1].rows.cpu())
    assert torch.equal(pools[1].load(rows.cuda()).cpu(), packed)


def entries(runner: ModelRunner, seq: ModelSequence, source: int) -> torch.Tensor:
    """Records of the tokens that were found."""
    pool = runner.cache.kv(source)
    return pool.load(stored_rows(runner, seq, source, seq.num_cached).to(pool.rows.device))


def check_hit(
    runner: ModelRunner, name: str, form: str, encoder: EncoderReplay, decoder: DecoderReplay, size: int | None
) -> None:
    window = runner.config.sliding_window
    golden = {k.removeprefix(f"{form}/"): v for k, v in case_arrays(name, "replay_fp32_noquant.npz", "S300_H256").items()}
    ids = golden["input_ids"].tolist()
    leave_behind(runner, prompt(ids[:256] + ids[:1], encoder, decoder))
    seq = opened(runner, prompt(ids, encoder, decoder))
    try:
        if encoder is EncoderReplay.OFF:
            fits = decoder is DecoderReplay.OFF or window <= 300 - 256
            # else the snapshot that the first prompt left for one like itself
            assert (seq.num_cached, seq.num_replayed) == (256 if fits else (257 - window) // 16 * 16, 0)
        else:
            assert (seq.num_cached, seq.num_replayed) == (256, window)
        before = {source: entries(runner, seq, source) for source in (2, 4)}
        hit = seq.num_cached
        rows = prefill(runner, seq, ids, size)
        logits = tail(runner, seq) if rows is None else rows[-1]
        if rows is not None:
            tail(runner, seq)
        if hit:
            for source, records in before.items():
                assert torch.equal(records, entries(runner, seq, source))
        assert np.abs(logits - golden["logits_last2"][-1]).max() <= 2e-3
        decoded = []
        for token in golden["decode_ids"].tolist():
            seq.prompt.chain.token_ids.append(token)
            decoded.append(decode(runner, seq, token))
        assert np.abs(np.stack(decoded) - golden["decode_logits"]).max() <= 2e-3
    finally:
        runner.close(seq)
