"""Parameters and gradients by their global name, whatever the layout: set them, read them, compare them.

Megatron Core's sharded state dict says which slice of which global tensor each local one is (tensor, expert and
pipeline parallelism, fused gate and up). Everything here goes through it, so it knows nothing of any model.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor


@dataclass
class Piece:
    """A slice of a global tensor held by one rank."""

    key: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    value: np.ndarray

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(start, start + size) for start, size in zip(self.offset, self.value.shape, strict=True))


def sharded_tensors(model: Any, *arguments: Any, **keywords: Any) -> list[ShardedTensor]:
    """Return the tensors of a module's `sharded_state_dict`, called with these arguments, with factories applied."""
    # Megatron Core takes ten seconds to import: this module is imported while tests are collected.
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    state = model.sharded_state_dict(*arguments, **keywords)
    apply_factories(state)
    return [entry for entry in nested_values(state) if isinstance(entry, ShardedTensor)]


def _canonical(key: str) -> str:
    return key.replace(".module.", ".")


def _local_shape(entry: ShardedTensor) -> tuple[int, ...]:
    return (1,) * entry.prepend_axis_num + tuple(entry.data.shape)


def initial_value(key: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the whole global tensor, a function of its name alone."""
    seed = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=4).digest(), "little")
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
    if "norm" in key and key.endswith("weight"):
        return 1 + 0.1 * noise
    if "embedding" in key or "position" in key or "class_token" in key:
        return 0.5 * noise
    if key.endswith("bias"):
        return 0.1 * noise
    return noise * (0.7 / shape[-1] ** 0.5)


@torch.no_grad()
def set_parameters(model: Any) -> None:
    """Give every parameter of this rank its slice of `initial_value`."""
    for entry in sharded_tensors(model):
        full = initial_value(_canonical(entry.key), tuple(entry.global_shape))
        piece = Piece(entry.key, tuple(entry.global_shape), tuple(entry.global_offset), np.empty(_local_shape(entry)))
        entry.data.copy_(full[piece.slices].reshape(entry.data.shape))


@torch.no_grad()
def read_parameters(model: Any) -> list[Piece]:
    """This rank's slices of all parameters."""
    return [
        Piece(_canonical(entry.key), tuple(entry.global_shape), tuple(entry.global_offset),
              entry.data.detach().float().cpu().numpy().reshape(_local_shape(entry)).copy())
        for entry in sharded_tensors(model)
    ]


@torch.no_grad()
def read_gradients(model: Any) -> list[Piece]:
    """This rank's slices of the gradients: `main_grad` of wrapped parameters, else `grad`, else zero."""
    kept = {}
    for parameter in model.parameters():
        kept[parameter] = parameter.data
        gradient = vars(parameter).get("main_grad", parameter.grad) if parameter.requires_grad else None
        parameter.data = torch.zeros_like(kept[parameter]) if gradient is None else gradient.to(kept[parameter].dtype)
    pieces = read_parameters(model)
    for parameter, data in kept.items():
        parameter.data = data
    return pieces


def assemble(pieces: list[Piece]) -> dict[str, np.ndarray]:
    """Global tensors from one process's pieces. Fails unless they cover each tensor."""
    tensors: dict[str, np.ndarray] = {}
    for piece in pieces:
        tensors.setdefault(piece.key, np.full(piece.shape, np.nan, np.float32))[piece.slices] = piece.value
    for key, value in tensors.items():
        assert np.isfinite(value).all(), f"{key} is not covered or not finite"
    return tensors


def worst_errors(reference: dict[str, np.ndarray], by_rank: list[list[Piece]]) -> dict[str, float]:
    """Largest relative error of each tensor over all replicas of all its slices, in norm of the whole tensor.

    Every rank's copy counts: a replica that differs from the others is an error too. Fails unless the ranks together
    cover exactly the reference's tensors.
    """
    covered = {key: np.zeros(value.shape, bool) for key, value in reference.items()}
    errors: dict[str, float] = dict.fromkeys(reference, 0.0)
    for rank, pieces in enumerate(by_rank):
        squares: dict[str, float] = {}
        for piece in pieces:
            assert piece.key in reference, f"rank {rank} holds {piece.key}, which the reference lacks"
            expected = reference[piece.key]
            assert expected.shape == piece.shape, f"{piece.key}: {piece.shape} is not {expected.shape}"
            difference = (piece.value.astype(np.float64) - expected[piece.slices]) ** 2
            squares[piece.key] = squares.get(piece.key, 0.0) + float(difference.sum())
            covered[piece.key][piece.slices] = True
        for key, square in squares.items():
            norm = float(np.linalg.norm(reference[key].astype(np.float64)))
            error = square**0.5 / norm if norm else square**0.5
            errors[key] = max(errors[key], error)
    missing = [key for key, mask in covered.items() if not mask.all()]
    assert not missing, f"no rank holds all of {missing}"
    return errors
