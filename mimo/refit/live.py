"""This rank's weights as they are now."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core.utils import unwrap_model

from mimo.model.build import BuiltModel, named_modules_of
from mimo.refit.slots import Address


def finish_gathers(built: BuiltModel) -> None:
    """Finish the gathers of parameters that an overlapped optimizer step left open. Collective; before every sync."""
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
        self._built = built
        self._layouts = {f"{module}/{name}": (tuple(tensor.shape), tensor.stride())
                         for module, part in named_modules_of(built.model)
                         for name, tensor in (*unwrap_model(part).named_parameters(),
                                              *unwrap_model(part).named_buffers())}

    def tensor(self, path: str) -> torch.Tensor:
        """The tensor at `MODULE/PATH`, detached: writing into it changes the model.

        Raises:
            RuntimeError: there is none, its layout is not that of the set-up, or its memory is gone; naming it.
        """
        module, _, name = path.partition("/")
        owner_name, _, leaf = name.rpartition(".")
        part = dict(named_modules_of(self._built.model)).get(module)
        if part is None or path not in self._layouts:
            raise RuntimeError(f"{path} is not a tensor of this rank's model")
        owner = unwrap_model(part).get_submodule(owner_name)
        tensor = dict((*owner.named_buffers(recurse=False), *owner.named_parameters(recurse=False))).get(leaf)
        if tensor is None:
            raise RuntimeError(f"{path} was a tensor of this rank's model at set-up and is none now")
        layout = (tuple(tensor.shape), tensor.stride())
        if layout != self._layouts[path]:
            raise RuntimeError(f"{path} has shape and strides {layout}; at set-up it had {self._layouts[path]}")
        if tensor.untyped_storage().nbytes() == 0 and tensor.numel():
            raise RuntimeError(f"{path} has no memory: its weights are offloaded")
        return tensor.detach()

    def view(self, address: Address, sizes: Sequence[int]) -> torch.Tensor:
        """The box of these sizes at an address. Raises RuntimeError as `tensor`."""
        tensor = self.tensor(address.tensor)
        return torch.as_strided(tensor, tuple(sizes), address.strides, tensor.storage_offset() + address.offset)
