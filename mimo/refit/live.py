"""This rank's weights as they are now."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core.utils import unwrap_model

from mimo.model.build import BuiltModel, named_modules_of
from mimo.model.residency import WEIGHTS
from mimo.refit.slots import Address


def finish_gathers(built: BuiltModel) -> None:
    """Finish the gathers of parameters that an overlapped optimizer step left open. Collective; before every sync.

    Raises:
        OffloadedError: there are no weights to gather.
    """
    built.residency.require("a refit", WEIGHTS)
    built.model.disable_forward_pre_hook()
    built.model.enable_forward_pre_hook()


class LiveTensors:
    """Views of a rank's parameters and buffers by address, looked up afresh at every call.

    Only shapes and strides are remembered, against which what is found is checked: a parameter may be given new memory
    between two syncs, but an address is void where its layout changes.

    Args:
        built: this rank's model.
    """

    def __init__(self, built: BuiltModel) -> None:
        self._owners = {}
        for module, part in named_modules_of(built.model):
            for prefix, owner in unwrap_model(part).named_modules():
                for name, tensor in (*owner.named_parameters(recurse=False), *owner.named_buffers(recurse=False)):
                    path = f"{module}/{prefix}.{name}" if prefix else f"{module}/{name}"
                    self._owners[path] = owner, name, tuple(tensor.shape), tensor.stride()

    def tensor(self, path: str) -> torch.Tensor:
        """The tensor at `MODULE/PATH`, detached: writing into it changes the model.

        Raises:
            RuntimeError: there is none, its layout is not that of the set-up, or its memory is gone; naming it.
        """
        if path not in self._owners:
            raise RuntimeError(f"{path} is not a tensor of this rank's model")
        owner, name, shape, strides = self._owners[path]
        tensor = owner._parameters.get(name)
        if tensor is None:
            tensor = owner._buffers.get(name)
        if tensor is None:
            raise RuntimeError(f"{path} was a tensor of this rank's model at set-up and is none now")
        if (tensor.shape, tensor.stride()) != (shape, strides):
            raise RuntimeError(f"{path} has shape and strides {(tuple(tensor.shape), tensor.stride())}; at set-up it "
                               f"had {(shape, strides)}")
        if tensor.untyped_storage().nbytes() == 0 and tensor.numel():
            raise RuntimeError(f"{path} has no memory: its weights are offloaded")
        return tensor.detach()

    def view(self, address: Address, sizes: Sequence[int]) -> torch.Tensor:
        """The box of these sizes at an address. Raises RuntimeError as `tensor`."""
        tensor = self.tensor(address.tensor)
        return torch.as_strided(tensor, tuple(sizes), address.strides, tensor.storage_offset() + address.offset)
