"""Activation of routed experts and the router's weights on CUDA, as one Triton kernel for each pass.

Megatron Core's functions, which `torch.compile` fuses, need two kernels for the backward pass, and read what they share
twice. They also compute rows that no expert has. With --moe-static-rows and four ranks, these are up to three quarters
of the rows.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

# Rows and columns that a program computes at a time, and its warps. A thread has eight elements, 16 bytes of bfloat16.
ROWS, COLUMNS, WARPS = 4, 256, 4


def weighted_activation(hidden: torch.Tensor, weights: torch.Tensor, num_rows: torch.Tensor | None = None, *,
                        gated: bool) -> torch.Tensor:
    """Apply SwiGLU or squared ReLU to rows, and multiply each row by its weight, in float32.

    Args:
        hidden: `[rows, 2 * columns]` with `gated`: values of the gate, then those that it multiplies (SwiGLU,
            arXiv:2002.05202). Otherwise `[rows, columns]` (squared ReLU, arXiv:2109.08668).
        weights: `[rows]`.
        num_rows: int64 `[]` on the device; rows from this one on are neither read nor written. None: all rows count.
        gated: the activation.

    Returns:
        `[rows, columns]` in the dtype of `hidden`.
    """
    result: torch.Tensor = _WeightedActivation.apply(hidden, weights, num_rows, gated)
    return result


class _WeightedActivation(torch.autograd.Function):
    """Both passes of `weighted_activation`."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weights: torch.Tensor, num_rows: torch.Tensor | None,
                gated: bool) -> torch.Tensor:
        hidden, weights = hidden.contiguous(), weights.contiguous()
        rows, width = hidden.shape[0], hidden.shape[1] // (2 if gated else 1)
        out = hidden.new_empty(rows, width)
        _forward[(triton.cdiv(rows, ROWS),)](hidden, weights, out, num_rows, rows, width, GATED=gated, ROWS=ROWS,
                                            COLUMNS=COLUMNS, num_warps=WARPS)
        ctx.save_for_backward(hidden, weights, num_rows)
        ctx.gated = gated
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        hidden, weights, num_rows = ctx.saved_tensors
        gradient = gradient.contiguous()
        of_hidden, of_weights = torch.empty_like(hidden), torch.empty_like(weights)
        rows, width = gradient.shape
        _backward[(triton.cdiv(rows, ROWS),)](hidden, weights, gradient, of_hidden, of_weights, num_rows, rows, width,
                                             GATED=ctx.gated, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=WARPS)
        return of_hidden, of_weights, None, None


@triton.jit
def _sum(one, other):  # type: ignore[no-untyped-def]
    return one + other


@triton.jit  # Triton compiles the source; types of arguments are those of each call.
def _forward(  # type: ignore[no-untyped-def]
    hidden, weights, out, num_rows, max_rows, width, GATED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):
    places = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if num_rows is not None:
        max_rows = tl.load(num_rows)
    if tl.program_id(0) * ROWS < max_rows:
        weight = tl.load(weights + places, mask=places < max_rows, other=0.0).to(tl.float32)[:, None]
        rows = places.to(tl.int64)[:, None]
        for start in range(0, width, COLUMNS):
            columns = start + tl.arange(0, COLUMNS)[None, :]
            inside = (rows < max_rows) & (columns < width)
            if GATED:
                gate = tl.load(hidden + rows * (2 * width) + columns, mask=inside, other=0.0).to(tl.float32)
                value = tl.load(hidden + rows * (2 * width) + width + columns, mask=inside, other=0.0).to(tl.float32)
                result = gate / (1 + tl.exp(-gate)) * value
            else:
                positive = tl.maximum(tl.load(hidden + rows * width + columns, mask=inside, other=0.0).to(tl.float32),
                                      0.0)
                result = positive * positive
            tl.store(out + rows * width + columns, (result * weight).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    hidden, weights, gradient, of_hidden, of_weights, num_rows, max_rows, width, GATED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):
    places = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if num_rows is not None:
        max_rows = tl.load(num_rows)
    if tl.program_id(0) * ROWS < max_rows:
        weight = tl.load(weights + places, mask=places < max_rows, other=0.0).to(tl.float32)[:, None]
        rows = places.to(tl.int64)[:, None]
        sums = tl.full([ROWS], 0.0, tl.float32)
        for start in range(0, width, COLUMNS):
            columns = start + tl.arange(0, COLUMNS)[None, :]
            inside = (rows < max_rows) & (columns < width)
            given = tl.load(gradient + rows * width + columns, mask=inside, other=0.0).to(tl.float32)
            if GATED:
                at = hidden + rows * (2 * width) + columns
                to = of_hidden + rows * (2 * width) + columns
                gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
                value = tl.load(at + width, mask=inside, other=0.0).to(tl.float32)
                share = 1 / (1 + tl.exp(-gate))
                result = gate * share * value
                slope = share * (1 + gate * (1 - share)) * value
                tl.store(to + width, (given * weight * gate * share).to(of_hidden.dtype.element_ty), mask=inside)
            else:
                at = hidden + rows * width + columns
                to = of_hidden + rows * width + columns
                positive = tl.maximum(tl.load(at, mask=inside, other=0.0).to(tl.float32), 0.0)
                result = positive * positive
                slope = 2 * positive
            tl.store(to, (given * weight * slope).to(of_hidden.dtype.element_ty), mask=inside)
            sums += tl.reduce(given * result, 1, _sum)
        tl.store(of_weights + places, sums.to(of_weights.dtype.element_ty), mask=places < max_rows)
