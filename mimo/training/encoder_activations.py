"""Keep as many activations of an encoder as a budget allows, and recompute the others in the backward pass.

The unit is a layer of a forward pass. `--encoder-recompute full` recomputes all layers of every pass; here the number
is chosen pass by pass (Megatron Core's recomputation by `block`, which takes the first layers). The images of a pass
are never split for it, so the same kernels run in the same order whatever the budget, and results are equal to the last
bit. Megatron Core restores the random generators for a recomputed layer, so that holds with dropout, too.

What a layer keeps is measured, as it depends on the implementation of layers and attention: the first layer of the
encoder runs once more, and the tensors that autograd saves for its backward pass are counted. This happens in the first
pass and in any that is larger than all before it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.transformer_block import TransformerBlock


@dataclass
class ActivationBudget:
    """Activations that all encoders of a rank may keep.

    Attributes:
        limit: bytes.
        kept: bytes of the passes whose backward pass has not run yet.
    """

    limit: int
    kept: int = 0


class LayerRecomputation:
    """Chooses how many layers of an encoder are recomputed in each pass.

    All encoders of the rank share the budget.

    Raises:
        ValueError: the layers of the encoder are not one block of Megatron Core.
    """

    def __init__(self, name: str, encoder: torch.nn.Module, budget: ActivationBudget) -> None:
        blocks = [part for part in encoder.modules() if isinstance(part, TransformerBlock)]
        if len(blocks) != 1:
            raise ValueError(f"--encoder-activation-gib: the layers of {name} are {len(blocks)} TransformerBlocks of "
                             "Megatron Core; it needs an encoder with one. Leave it out, and choose a smaller "
                             "--encoder-window if memory runs out")
        self._block, self._budget = blocks[0], budget
        self._layers = self._block.layers
        # Bytes that a layer keeps for each element of pixels, the most that was measured, and the largest pass so far.
        # Ranks of a tensor-parallel group run the same passes and measure the same, so they recompute the same layers.
        self._rate, self._largest = 0.0, 0

    def choose(self, sizes: Sequence[int]) -> list[tuple[int, int]]:
        """Decide which layers of the coming passes keep their activations. The budget then holds them as kept.

        Backward passes run in the reverse order, so the last pass comes first, and in each pass the last layers: what
        is kept is freed soonest, and makes room for the layers that are recomputed after it.

        Args:
            sizes: elements of the pixels of each pass, in the order of the passes.

        Returns:
            For each pass the number of layers that keep their activations, and their bytes.
        """
        found = []
        for size in reversed(sizes):
            each = math.ceil(self._rate * size)
            # Nobody knows yet what a larger pass keeps.
            room = 0 if size > self._largest else self._budget.limit - self._budget.kept
            layers = min(len(self._layers), room // each) if each else 0
            self._budget.kept += layers * each
            found.append((layers, layers * each))
        return found[::-1]

    def release(self, kept: int) -> None:
        """Give back the bytes of a pass whose backward pass has run, or will not run."""
        self._budget.kept -= kept

    @contextlib.contextmanager
    def keeping(self, layers: int, size: int) -> Iterator[None]:
        """Context of one pass of the encoder, in which its last `layers` layers keep their activations.

        `layers` comes from `choose`. `size` is the number of elements of the pass's pixels.
        """
        config = self._block.config
        fields: dict[str, Any] = {"recompute_granularity": None, "recompute_method": None, "recompute_num_layers": None}
        again = len(self._layers) - layers
        if again:
            fields = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": again}
        before = {name: vars(config)[name] for name in fields}

        def measure(layer: torch.nn.Module, _: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if size > self._largest:
                self._largest = size  # before the layer runs again and comes here
                self._rate = max(self._rate, saved_bytes(layer, kwargs) / size)

        # A pass that is larger than all before it measures what its first layer keeps.
        handle = self._layers[0].register_forward_pre_hook(measure, with_kwargs=True) if size > self._largest else None
        vars(config).update(fields)
        try:
            yield
        finally:
            if handle is not None:
                handle.remove()
            vars(config).update(before)


def saved_bytes(layer: torch.nn.Module, inputs: dict[str, Any]) -> int:
    """Run a layer and return the bytes of all that is saved for its backward pass, without parameters and input.

    The input is kept by a recomputed layer, too. Nothing else changes: no gradient flows, and the random generators are
    as before. `inputs` are the keyword arguments of the layer, with `hidden_states`.
    """
    hidden = inputs["hidden_states"].detach().requires_grad_()
    left_out = {tensor.untyped_storage().data_ptr() for tensor in (hidden, *layer.parameters())}
    found: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in left_out:
            found[storage.data_ptr()] = storage.nbytes()
        # Without its graph: an operation that saved its own output would keep itself alive forever.
        return tensor.detach()

    tracker = get_cuda_rng_tracker()
    host, device, streams = torch.get_rng_state(), torch.cuda.get_rng_state(), tracker.get_states()
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        # The graph holds what is saved until the end, so no two of these tensors have the same address.
        output = layer(**{**inputs, "hidden_states": hidden})
    del output
    torch.set_rng_state(host)
    torch.cuda.set_rng_state(device)
    tracker.set_states(streams)
    return sum(found.values())
