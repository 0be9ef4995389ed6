"""Adam's update on CUDA as one Triton kernel that clips the gradients, updates, and writes the bfloat16 weights.

With Transformer Engine's `FusedAdam`, these are three passes over the parameters, which move 42 bytes of each: one
scales the gradients in place, one updates the float32 weights and moments, and one copies the weights to bfloat16. One
pass moves 30. `FusedAdam` also starts a kernel for every 21 million elements, whose 320 blocks do not divide evenly
among the 132 multiprocessors of an H100 or H200; here, a parameter group is a single launch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

# Elements that one program of the kernel updates, how many of them at a time, and with how many warps. With four
# elements a thread, a multiprocessor has room for enough threads to keep the memory busy: on an H200, 3.4 TB/s, and 2.6
# with sixteen elements a thread.
CHUNK, BLOCK, WARPS = 8192, 1024, 8
# Triton knows from this that loads of four floats, or eight bfloat16 numbers, are aligned.
ALIGNMENT_BYTES = 16

# Gradient, float32 weights, first and second moment, and bfloat16 weights, if there are any.
Row = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]


@dataclass
class AddressTable:
    """Addresses of the tensors of a parameter group, for the kernel.

    Attributes:
        host: int64 [tensors, 5], the addresses of gradient, float32 weights, first and second moment, and bfloat16
            weights (0 for a parameter without them).
        device: the same on the device.
        sizes: int64 [tensors], elements of each tensor, on the device.
        chunk_tensors: int32 [chunks], the tensor of each chunk of `CHUNK` elements, on the device.
        chunk_numbers: int32 [chunks], the chunk's number within its tensor, on the device.
        aligned: whether all addresses are multiples of `ALIGNMENT_BYTES`.
    """

    host: np.ndarray
    device: torch.Tensor
    sizes: torch.Tensor
    chunk_tensors: torch.Tensor
    chunk_numbers: torch.Tensor
    aligned: bool


class FusedUpdate:
    """Updates the parameters of a `FusedAdam` of Transformer Engine, whose groups and state stay as they are.

    Attributes:
        gradient_scale: factor for the gradients in the next `step`, which sets it back to 1. The gradients in memory
            keep their values.
        weights: the bfloat16 weights to write, by the float32 parameter of `FusedAdam` that they are a copy of. A
            parameter that is not in it has no such copy.
    """

    def __init__(self, adam: Any) -> None:
        self.gradient_scale = 1.0
        self.weights: Mapping[torch.Tensor, torch.Tensor] = {}
        self._adam = adam
        self._tables: dict[int, AddressTable | None] = {}

    def find_tensors(self) -> None:
        """Look up where all tensors are, for the next `step`. The device may still compute the gradients."""
        for number, group in enumerate(self._adam.param_groups):
            rows = self._rows(group["params"])
            self._tables[number] = current_table(rows, self._tables.get(number)) if rows else None

    @torch.no_grad()
    def step(self) -> None:
        """Update the parameters that `find_tensors` found, and count the step in every group, as `FusedAdam` does."""
        for number, group in enumerate(self._adam.param_groups):
            # Groups that have no parameters on this rank count, too, as other ranks read their number of steps.
            group["step"] = group.get("step", 0) + 1
            table = self._tables[number]
            if table is not None:
                update(table, group["lr"], group["betas"], group["eps"], group["weight_decay"],
                       group["step"] if group["bias_correction"] else None, self.gradient_scale)
        self.gradient_scale = 1.0

    def _rows(self, parameters: list[torch.Tensor]) -> list[Row]:
        rows: list[Row] = []
        for parameter in parameters:
            if parameter.grad is not None:
                state = self._adam.state[parameter]
                if not state:
                    self._adam.initialize_state(parameter, False)
                rows.append((parameter.grad, parameter, state["exp_avg"], state["exp_avg_sq"],
                             self.weights.get(parameter)))
        return rows


def current_table(rows: Sequence[Row], known: AddressTable | None) -> AddressTable:
    """Return the table of the tensors in `rows`: `known`, unless a tensor has moved since it was made.

    Tensors move, for example, when they return from host memory. Comparing all addresses in every step costs the host
    about a microsecond for a parameter.
    """
    host = np.array([[0 if tensor is None else tensor.data_ptr() for tensor in row] for row in rows], dtype=np.int64)
    if known is not None and np.array_equal(known.host, host):
        return known
    for *states, weight in rows:
        tensors = states if weight is None else [*states, weight]
        assert all(tensor.is_contiguous() and tensor.numel() == states[0].numel() for tensor in tensors)
        assert [tensor.dtype for tensor in tensors] == ([torch.float32] * 4 + [torch.bfloat16])[:len(tensors)]
    sizes = np.array([row[0].numel() for row in rows], dtype=np.int64)
    chunks = -(-sizes // CHUNK)
    numbers = np.arange(chunks.sum()) - np.repeat(np.cumsum(chunks) - chunks, chunks)

    def on_device(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(rows[0][0].device)

    return AddressTable(host, on_device(host), on_device(sizes),
                        on_device(np.repeat(np.arange(len(rows)), chunks).astype(np.int32)),
                        on_device(numbers.astype(np.int32)), bool((host % ALIGNMENT_BYTES == 0).all()))


def update(table: AddressTable, lr: float, betas: tuple[float, float], eps: float, weight_decay: float,
           step: int | None, gradient_scale: float) -> None:
    """Do one step of Adam with decoupled weight decay (Loshchilov and Hutter, arXiv:1711.05101) on a group.

    `step` counts from 1 and corrects the bias of the moments; None: no correction.
    """
    # `FusedAdam` hands its kernel float32 numbers, and raises them to powers in float64.
    corrections = [1.0 if step is None else 1 - float(np.float32(beta)) ** step for beta in betas]
    _adam_chunk[(len(table.chunk_tensors),)](
        table.device, table.sizes, table.chunk_tensors, table.chunk_numbers, float(lr), *betas, eps,
        float(weight_decay), *corrections, gradient_scale, CHUNK=CHUNK, BLOCK=BLOCK, ALIGNED=table.aligned,
        ALIGNMENT=ALIGNMENT_BYTES, num_warps=WARPS)


@triton.jit  # Triton compiles the source; types of arguments are those of each call.
def _adam_chunk(  # type: ignore[no-untyped-def]
    addresses, sizes, chunk_tensors, chunk_numbers, lr, beta1, beta2, eps, weight_decay, correction1, correction2,
    gradient_scale, CHUNK: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr, ALIGNMENT: tl.constexpr,
):
    tensor = tl.load(chunk_tensors + tl.program_id(0)).to(tl.int64)
    begin = tl.load(chunk_numbers + tl.program_id(0)).to(tl.int64) * CHUNK
    size = tl.load(sizes + tensor)
    row = addresses + tensor * 5
    gradient = tl.load(row).to(tl.pointer_type(tl.float32))
    main = tl.load(row + 1).to(tl.pointer_type(tl.float32))
    moment1 = tl.load(row + 2).to(tl.pointer_type(tl.float32))
    moment2 = tl.load(row + 3).to(tl.pointer_type(tl.float32))
    weight_address = tl.load(row + 4)
    weight = weight_address.to(tl.pointer_type(tl.bfloat16))
    if ALIGNED:
        gradient = tl.multiple_of(gradient, ALIGNMENT)
        main = tl.multiple_of(main, ALIGNMENT)
        moment1 = tl.multiple_of(moment1, ALIGNMENT)
        moment2 = tl.multiple_of(moment2, ALIGNMENT)
        weight = tl.multiple_of(weight, ALIGNMENT)
    # Without a mask, every thread loads and stores 16 bytes at once. Only a tensor's last chunk needs one.
    if begin + CHUNK <= size:
        for start in range(0, CHUNK, BLOCK):
            offsets = begin + start + tl.arange(0, BLOCK)
            _adam_block(gradient, main, moment1, moment2, weight, weight_address, offsets,
                          tl.full([BLOCK], 1, tl.int1), lr, beta1, beta2, eps, weight_decay, correction1, correction2,
                          gradient_scale)
    else:
        for start in range(0, CHUNK, BLOCK):
            offsets = begin + start + tl.arange(0, BLOCK)
            _adam_block(gradient, main, moment1, moment2, weight, weight_address, offsets, offsets < size, lr, beta1,
                          beta2, eps, weight_decay, correction1, correction2, gradient_scale)


@triton.jit
def _adam_block(  # type: ignore[no-untyped-def]
    gradient, main, moment1, moment2, weight, weight_address, offsets, inside, lr, beta1, beta2, eps, weight_decay,
    correction1, correction2, gradient_scale,
):
    g = tl.load(gradient + offsets, mask=inside) * gradient_scale
    p = tl.load(main + offsets, mask=inside)
    m = beta1 * tl.load(moment1 + offsets, mask=inside) + (1 - beta1) * g
    v = beta2 * tl.load(moment2 + offsets, mask=inside) + (1 - beta2) * g * g
    # Rounded as IEEE 754 asks, like the divisions and roots of FusedAdam's kernel.
    denominator = tl.sqrt_rn(tl.div_rn(v, correction2)) + eps
    p -= lr * (tl.div_rn(tl.div_rn(m, correction1), denominator) + weight_decay * p)
    tl.store(main + offsets, p, mask=inside)
    tl.store(moment1 + offsets, m, mask=inside)
    tl.store(moment2 + offsets, v, mask=inside)
    if weight_address != 0:
        tl.store(weight + offsets, p.to(tl.bfloat16), mask=inside)
