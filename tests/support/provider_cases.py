"""Builds a provider's modules on a layout and runs them, inside a worker process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mimo.grid.groups import Grids
from mimo.grid.spec import GridSpec, Layout
from mimo.platform import current_platform
from mimo.protocols import LANGUAGE, BuildContext
from providers.common.family import VISION
from providers.llava import Config, provider


@contextlib.contextmanager
def grids_of(vision: GridSpec, language: GridSpec) -> Iterator[Grids]:
    """Process groups of two grids over the same ranks."""
    with Grids(Layout("colocated", language.size, (vision,), language), "gloo") as grids:
        yield grids


def context_of(grids: Grids, module: str, seq_length: int) -> BuildContext:
    """Return the context that the trainer gives the provider on this rank, with sequence parallelism if tp > 1."""
    spec = grids.layout.grids[module]
    stage = spec.coordinates(grids.rank)["pp"]
    return BuildContext(grid=spec, groups=grids.collections[module], params_dtype=torch.float32,
                        transformer_impl="local", sequence_parallel=module == LANGUAGE and spec.tp > 1,
                        recompute="none", pre_process=stage == 0, post_process=stage == spec.pp - 1,
                        seq_length=seq_length)


def build_module_of(grids: Grids, config: Config, module: str, seq_length: int) -> Any:
    """This rank's part of a module, with parameters drawn by `randomize`."""
    from megatron.core.transformer.spec_utils import build_module

    current_platform().seed(7, tp_rank=0, ep_rank=0, expt_tp_rank=0)
    context = context_of(grids, module, seq_length)
    if module == LANGUAGE:
        built = build_module(provider.language_spec(config, context))
    else:
        spec = provider.encoder_spec(config, VISION, context)
        built = spec.module.from_spec(spec, is_first_stage=context.pre_process, is_last_stage=context.post_process)
    randomize(built)
    return built


def randomize(module: torch.nn.Module) -> None:
    """Draw parameters so that every one of them matters: matrices keep the scale of their input, norms stay near 1."""
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            if parameter.ndim > 1:
                parameter.copy_(noise / parameter[0].numel() ** 0.5)
            else:
                norm = name.endswith("weight")
                parameter.copy_(noise * 0.1 + (1.0 if norm else 0.0))


def draw(*shape: int, seed: int = 3) -> Tensor:
    """Standard normal float32 numbers, the same on every rank."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what was expected."""
    assert found.shape == expected.shape, (found.shape, expected.shape)
    return float((found - expected).norm() / expected.norm().clamp_min(1e-30))


def shard_of(name: str, full: Tensor, part: Tensor, stride: int, rank: int) -> Tensor:
    """Return the rows or columns of an unsplit tensor that a rank holds.

    Args:
        name: parameter, for messages.
        full: unsplit tensor.
        part: what this rank holds, for its shape.
        stride: equal blocks that are each split (2 for gate above up).
        rank: rank in the group over which it is split.
    """
    if full.shape == part.shape:
        return full
    (axis,) = [axis for axis, (whole, piece) in enumerate(zip(full.shape, part.shape, strict=True)) if whole != piece]
    count = full.size(axis) // part.size(axis)
    blocks = [block.chunk(count, dim=axis)[rank] for block in full.chunk(stride, dim=axis)]
    shard = torch.cat(blocks, dim=axis)
    assert shard.shape == part.shape, (name, full.shape, part.shape)
    return shard
