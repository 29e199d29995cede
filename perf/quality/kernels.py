# SPDX-License-Identifier: Apache-2.0
"""The two operations of the training forward that a GPU would spend most of its time launching: Triton there, PyTorch elsewhere.

Both are autograd functions whose PyTorch form is the definition; ``tests/perf/test_quality_kernels.py`` compares the two.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

try:
    import triton  # type: ignore[import-not-found, unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found, unused-ignore]
except ImportError:  # a CPU build of torch brings none
    triton = None


def use_triton(x: Tensor) -> bool:
    """Tensors of a GPU, where Triton is installed."""
    return triton is not None and x.is_cuda


def sinkhorn_reference(logits: Tensor, eps: float, iterations: int) -> Tensor:
    """As `cedar.model.mhc.sinkhorn`, without its in-place updates. logits float32 [T, hc, hc]."""
    kernel = logits.softmax(-1) + eps
    u = kernel.new_ones(kernel.shape[:-1])
    v = 1 / ((kernel * u[..., :, None]).sum(-2) + eps)
    for _ in range(iterations - 1):
        u = 1 / ((kernel * v[..., None, :]).sum(-1) + eps / u)
        v = 1 / ((kernel * u[..., :, None]).sum(-2) + eps / v)
    return kernel * u[..., :, None] * v[..., None, :]


def window_visible(rows: Tensor, doc_start: Tensor, window: int) -> Tensor:
    """Which of the 2 W keys of its own and the previous chunk a row sees.

    rows: int64 [T'] row numbers, a multiple of W from a multiple of W; doc_start: int64 [B, T'], first row of each row's
    document. Key k of a chunk that starts at c is row c - W + k. Returns bool [B, T', 2 W].
    """
    first = rows // window * window - window
    keys = first[:, None] + torch.arange(2 * window, device=rows.device)
    near = (keys <= rows[:, None]) & (keys > rows[:, None] - window)
    return near & (keys >= doc_start[..., None])


def entries_visible(rows: Tensor, doc_start: Tensor, ratio: int, count: int) -> Tensor:
    """Which compressed entries a row sees: groups of its document that have ended. Returns bool [B, T', count]."""
    first = torch.arange(count, device=rows.device) * ratio
    return (first + ratio - 1 <= rows[:, None]) & (first >= doc_start[..., None])


def joint_softmax_reference(
    near: Tensor, far: Tensor | None, sink: Tensor, see_near: Tensor, see_far: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Softmax over window scores, entry scores and one sink logit a head, which takes its share of the sum and has no value.

    near [B, T', H, 2 W] and far [B, T', H, N] in the compute dtype; sink float32 [H]; see_*: bool [B, T', .].
    """
    scores = [near.float().masked_fill(~see_near[:, :, None], -torch.inf)]
    if far is not None:
        assert see_far is not None
        scores.append(far.float().masked_fill(~see_far[:, :, None], -torch.inf))
    joined = torch.cat([*scores, sink[:, None].expand(*near.shape[:3], 1)], dim=-1).softmax(-1)
    split = near.shape[-1]
    return joined[..., :split].to(near.dtype), None if far is None else joined[..., split:-1].to(near.dtype)


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _load_matrices(pointer, count, BLOCK: tl.constexpr, HC: tl.constexpr):  # type: ignore[no-untyped-def]
        token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        cell = tl.arange(0, HC)[:, None] * HC + tl.arange(0, HC)[None, :]
        at = token[:, None, None] * (HC * HC) + cell[None, :, :]
        inside = (token < count)[:, None, None] & (cell[None, :, :] >= 0)
        return at, inside, tl.load(pointer + at, mask=inside, other=0.0)

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _softmax_rows(logits):  # type: ignore[no-untyped-def]
        powers = tl.exp(logits - tl.max(logits, axis=2)[:, :, None])
        return powers / tl.sum(powers, axis=2)[:, :, None]

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _sinkhorn_forward(logits, out, count, eps, ITERATIONS: tl.constexpr, BLOCK: tl.constexpr, HC: tl.constexpr):  # type: ignore[no-untyped-def]
        at, inside, values = _load_matrices(logits, count, BLOCK, HC)
        kernel = _softmax_rows(values) + eps
        u = tl.full((BLOCK, HC), 1.0, tl.float32)
        v = 1.0 / (tl.sum(kernel * u[:, :, None], axis=1) + eps)
        for _ in range(ITERATIONS - 1):
            u = 1.0 / (tl.sum(kernel * v[:, None, :], axis=2) + eps / u)
            v = 1.0 / (tl.sum(kernel * u[:, :, None], axis=1) + eps / v)
        tl.store(out + at, kernel * u[:, :, None] * v[:, None, :], mask=inside)

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _sinkhorn_backward(logits, grad, out, past, count, eps, ITERATIONS: tl.constexpr, BLOCK: tl.constexpr, HC: tl.constexpr):  # type: ignore[no-untyped-def]
        """The chain of divisions, last first. Every u and v is computed again and kept in ``past`` [programs, 2, ITERATIONS,
        BLOCK, HC] on the way up."""
        at, inside, values = _load_matrices(logits, count, BLOCK, HC)
        _, _, upper = _load_matrices(grad, count, BLOCK, HC)
        soft = _softmax_rows(values)
        kernel = soft + eps
        cell = tl.arange(0, BLOCK)[:, None] * HC + tl.arange(0, HC)[None, :]
        past_u = past + tl.program_id(0).to(tl.int64) * (2 * ITERATIONS * BLOCK * HC) + cell
        past_v = past_u + ITERATIONS * BLOCK * HC
        u = tl.full((BLOCK, HC), 1.0, tl.float32)
        v = 1.0 / (tl.sum(kernel * u[:, :, None], axis=1) + eps)
        for step in range(ITERATIONS - 1):
            tl.store(past_u + step * (BLOCK * HC), u)
            tl.store(past_v + step * (BLOCK * HC), v)
            u = 1.0 / (tl.sum(kernel * v[:, None, :], axis=2) + eps / u)
            v = 1.0 / (tl.sum(kernel * u[:, :, None], axis=1) + eps / v)
        tl.debug_barrier()
        d_kernel = upper * u[:, :, None] * v[:, None, :]
        d_u = tl.sum(upper * kernel * v[:, None, :], axis=2)
        d_v = tl.sum(upper * kernel * u[:, :, None], axis=1)
        for back in range(ITERATIONS - 1):
            earlier_u = tl.load(past_u + (ITERATIONS - 2 - back) * (BLOCK * HC))
            earlier_v = tl.load(past_v + (ITERATIONS - 2 - back) * (BLOCK * HC))
            # v = 1 / (sum_i K_ij u_i + eps / earlier_v)
            d_sum = -d_v * v * v
            d_kernel += u[:, :, None] * d_sum[:, None, :]
            d_u += tl.sum(kernel * d_sum[:, None, :], axis=2)
            d_v = -d_sum * eps / (earlier_v * earlier_v)
            # u = 1 / (sum_j K_ij earlier_v_j + eps / earlier_u)
            d_sum_u = -d_u * u * u
            d_kernel += d_sum_u[:, :, None] * earlier_v[:, None, :]
            d_v += tl.sum(kernel * d_sum_u[:, :, None], axis=1)
            d_u = -d_sum_u * eps / (earlier_u * earlier_u)
            u, v = earlier_u, earlier_v
        d_kernel += (-d_v * v * v)[:, None, :] * u[:, :, None]  # the first v, from u = 1
        d_logits = soft * (d_kernel - tl.sum(d_kernel * soft, axis=2)[:, :, None])
        tl.store(out + at, d_logits, mask=inside)

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _see(row, start, selected, W: tl.constexpr, N: tl.constexpr, NB: tl.constexpr, RATIO: tl.constexpr, SELECT: tl.constexpr):  # type: ignore[no-untyped-def]
        slot = tl.arange(0, 2 * W)
        key = row // W * W - W + slot
        near = (key <= row) & (key > row - W) & (key >= start)
        entry = tl.arange(0, NB)
        far = (entry < N) & (entry * RATIO + RATIO - 1 <= row) & (entry * RATIO >= start)
        if SELECT:
            far = far & (tl.load(selected + entry, mask=far, other=0) != 0)
        return slot, near, entry, far

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _softmax_forward(  # type: ignore[no-untyped-def]
        near, far, sink, doc_start, selected, near_out, far_out, mass, rows, first_row,
        W: tl.constexpr, N: tl.constexpr, NB: tl.constexpr, RATIO: tl.constexpr, SELECT: tl.constexpr, H: tl.constexpr,
    ):  # fmt: skip
        """One row of all heads a program: (batch, row) -> probabilities, and their sum over heads of the entries."""
        program = tl.program_id(0).to(tl.int64)
        row = first_row + (program % rows).to(tl.int32)
        start = tl.load(doc_start + program).to(tl.int32)
        slot, see_near, entry, see_far = _see(row, start, selected + program * N, W, N, NB, RATIO, SELECT)
        total = tl.zeros((NB,), tl.float32)
        for head in range(H):
            at_near = (program * H + head) * (2 * W) + slot
            at_far = (program * H + head) * N + entry
            a = tl.load(near + at_near, mask=see_near, other=-float("inf")).to(tl.float32)
            b = tl.load(far + at_far, mask=see_far, other=-float("inf")).to(tl.float32)
            s = tl.load(sink + head)
            top = tl.maximum(tl.maximum(tl.max(a, axis=0), tl.max(b, axis=0)), s)
            a, b = tl.exp(a - top), tl.exp(b - top)
            scale = 1.0 / (tl.sum(a, axis=0) + tl.sum(b, axis=0) + tl.exp(s - top))
            tl.store(near_out + at_near, a * scale)
            tl.store(far_out + at_far, b * scale, mask=entry < N)
            total += b * scale
        tl.store(mass + program * N + entry, total, mask=entry < N)

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _softmax_backward(  # type: ignore[no-untyped-def]
        near_p, far_p, near_grad, far_grad, near_out, far_out, sink_out,
        W: tl.constexpr, N: tl.constexpr, NB: tl.constexpr, H: tl.constexpr, FAR: tl.constexpr,
    ):  # fmt: skip
        """One (row, head) a program: dS = P (dP - sum P dP). The sink's gradient is minus its own probability times that sum."""
        program = tl.program_id(0).to(tl.int64)
        slot, entry = tl.arange(0, 2 * W), tl.arange(0, NB)
        p = tl.load(near_p + program * (2 * W) + slot).to(tl.float32)
        g = tl.load(near_grad + program * (2 * W) + slot).to(tl.float32)
        dot = tl.sum(p * g, axis=0)
        taken = tl.sum(p, axis=0)
        if FAR:
            q = tl.load(far_p + program * N + entry, mask=entry < N, other=0.0).to(tl.float32)
            f = tl.load(far_grad + program * N + entry, mask=entry < N, other=0.0).to(tl.float32)
            dot += tl.sum(q * f, axis=0)
            taken += tl.sum(q, axis=0)
            tl.store(far_out + program * N + entry, q * (f - dot), mask=entry < N)
        tl.store(near_out + program * (2 * W) + slot, p * (g - dot))
        tl.store(sink_out + program, -(1.0 - taken) * dot)


_SINKHORN_BLOCK = 64


class _TritonSinkhorn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, eps: float, iterations: int) -> Tensor:
        logits = logits.contiguous()
        out, count, hc = torch.empty_like(logits), logits.shape[0], logits.shape[-1]
        grid = (triton.cdiv(count, _SINKHORN_BLOCK),)
        _sinkhorn_forward[grid](logits, out, count, eps, iterations, _SINKHORN_BLOCK, hc, num_warps=4)
        ctx.save_for_backward(logits)
        ctx.settings = (eps, iterations)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (logits,) = ctx.saved_tensors
        out, count, hc = torch.empty_like(logits), logits.shape[0], logits.shape[-1]
        programs, (eps, iterations) = triton.cdiv(count, _SINKHORN_BLOCK), ctx.settings
        past = torch.empty(programs, 2, iterations, _SINKHORN_BLOCK, hc, device=logits.device)
        _sinkhorn_backward[(programs,)](
            logits, grad.contiguous(), out, past, count, eps, iterations, _SINKHORN_BLOCK, hc, num_warps=4
        )
        return out, None, None


class _TritonSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, near: Tensor, far: Tensor | None, sink: Tensor, doc_start: Tensor, selected: Tensor | None,
        first_row: int, window: int, ratio: int,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
        batch, rows, heads, _ = near.shape
        count = 0 if far is None else far.shape[-1]
        near = near.contiguous()
        far_in = near if far is None else far.contiguous()
        near_out, far_out = torch.empty_like(near), torch.empty_like(far_in) if far is not None else near
        mass = torch.empty(batch, rows, count, device=near.device)
        picked = near if selected is None else selected.contiguous().view(torch.uint8)
        _softmax_forward[(batch * rows,)](
            near, far_in, sink.contiguous(), doc_start.contiguous(), picked,
            near_out, far_out, mass, rows, first_row,
            window, count, max(16, triton.next_power_of_2(count)), ratio, selected is not None, heads, num_warps=4,
        )  # fmt: skip
        ctx.save_for_backward(near_out, far_out)
        ctx.far = far is not None
        if far is None:
            return near_out, None, None
        ctx.mark_non_differentiable(mass)
        return near_out, far_out, mass

    @staticmethod
    def backward(ctx: Any, near_grad: Tensor, far_grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
        near_p, far_p = ctx.saved_tensors
        batch, rows, heads, width = near_p.shape
        count = far_p.shape[-1] if ctx.far else 0
        near_out, far_out = torch.empty_like(near_p), torch.empty_like(far_p) if ctx.far else near_p
        sink_out = torch.empty(batch, rows, heads, device=near_p.device)
        _softmax_backward[(batch * rows * heads,)](
            near_p, far_p, near_grad.contiguous(), far_grad.contiguous() if ctx.far and far_grad is not None else near_grad,
            near_out, far_out, sink_out, width // 2, count, max(16, triton.next_power_of_2(count)), heads, ctx.far, num_warps=4,
        )  # fmt: skip
        return near_out, far_out if ctx.far else None, sink_out.sum((0, 1)), None, None, None, None, None


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.shape = table.shape
        return table.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        return grad.new_zeros(ctx.shape).index_add_(0, rows, grad), None


def gather_rows(table: Tensor, rows: Tensor) -> Tensor:
    """table[rows], rows int64 [n]. The gradient is added up in the table's precision without a sort, so it can be captured."""
    out: Tensor = _GatherRows.apply(table, rows)  # type: ignore[no-untyped-call]
    return out


def sinkhorn(logits: Tensor, eps: float, iterations: int) -> Tensor:
    """Doubly stochastic matrices from logits float32 [T, hc, hc], differentiable through every iteration."""
    if use_triton(logits):
        out: Tensor = _TritonSinkhorn.apply(logits, eps, iterations)  # type: ignore[no-untyped-call]
        return out
    return sinkhorn_reference(logits, eps, iterations)


def joint_softmax(
    near: Tensor,
    far: Tensor | None,
    sink: Tensor,
    doc_start: Tensor,
    selected: Tensor | None,
    first_row: int,
    window: int,
    ratio: int,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Attention probabilities of rows [first_row, first_row + T') over their window, their entries and the sink.

    near: scores of the 2 W keys of `window_visible`, [B, T', H, 2 W]; far: of the entries, [B, T', H, N] (None: no ratio).
    doc_start: int [B, T']. selected: bool [B, T', N] or None (all visible entries). Returns both parts' probabilities and
    float32 [B, T', N], their sum over heads, without gradient.
    """
    if use_triton(near):
        triple: tuple[Tensor, Tensor | None, Tensor | None] = _TritonSoftmax.apply(  # type: ignore[no-untyped-call]
            near, far, sink, doc_start, selected, first_row, window, ratio
        )
        return triple
    rows = torch.arange(first_row, first_row + near.shape[1], device=near.device)
    see_far = None
    if far is not None:
        see_far = entries_visible(rows, doc_start, ratio, far.shape[-1])
        see_far = see_far if selected is None else see_far & selected
    p_near, p_far = joint_softmax_reference(near, far, sink, window_visible(rows, doc_start, window), see_far)
    return p_near, p_far, None if p_far is None else p_far.detach().float().sum(2)
