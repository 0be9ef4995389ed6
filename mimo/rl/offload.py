"""Hand a trainer's device memory to an engine on the same device, and take it back as it was.

Parameters are views of Megatron's contiguous buffers, optimizers and hooks refer to them by identity, and gradients are
accumulated through other views of other buffers. So it is storages that are emptied and filled again in place: every
view, hook and alias stays what it is. Moving a parameter's own data elsewhere would leave the buffer behind it alive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from mimo.model.build import GRADIENTS, KINDS, OPTIMIZER, WEIGHTS, BuiltModel
from mimo.training.optimizer import HeteroOptimizer

# torch's allocator of pinned memory rounds a block up to a power of two: memory is taken in blocks that are one.
BLOCK_BYTES = 256 << 20


@dataclass(frozen=True)
class Held:
    """A storage and the bytes that it has, or had before it was emptied."""

    storage: torch.UntypedStorage
    num_bytes: int


class Offload:
    """Moves weights, gradient buffers and optimizer state of one rank to host memory and back, each on its own.

    The usual order around a rollout on the same device: `gradients` and `optimizer`, refit, `weights`, rollout,
    `bring_back`. What was brought back is bit by bit what was moved; gradients are zero, as every step makes them.
    While anything is away, a step raises `mimo.model.build.OffloadedError`, and so does whatever needs what is
    away: a forward pass, a refit, a checkpoint, an export. Only between steps, on all ranks that share a module.

    Host memory is pinned on CUDA and kept from one use to the next: taking it is slower than the copy.

    Args:
        built: this rank's model.
        optimizer: its optimizers.
    """

    def __init__(self, built: BuiltModel, optimizer: HeteroOptimizer) -> None:
        self._built, self._optimizer = built, optimizer
        self._emptied: dict[str, list[Held]] = {}
        self._host: dict[str, HostMemory] = {}
        self._shadowed: list[tuple[Any, str, Any]] = []

    @property
    def offloaded(self) -> frozenset[str]:
        """Which of `mimo.model.build.KINDS` are away."""
        return frozenset(self._built.residency.offloaded)

    def weights(self) -> int:
        """Move parameters and buffers of every module, frozen ones included.

        Collective over each module's ranks: a gather of parameters that an overlapped step left open is finished first.

        Returns:
            Bytes of device memory given back; 0 where they were away already.
        """
        if WEIGHTS in self.offloaded:
            return 0
        self._built.model.disable_forward_pre_hook()
        self._built.model.enable_forward_pre_hook()
        return self._move(WEIGHTS, weight_storages(self._built))

    def gradients(self) -> int:
        """Give up the gradient buffers. Returns as `weights`."""
        # Gradients that are copies, not views of the buffers.
        self._optimizer.zero_grad()
        return self._move(GRADIENTS, _distinct(
            tensor for wrapped in self._built.wrapped.values() for buffer in _buffers_of(wrapped)
            for tensor in (buffer.grad_data, *buffer.extra_main_grads)))

    def optimizer(self) -> int:
        """Move fp32 copies of weights and the moments, of every module. Returns as `weights`."""
        weights = {storage._cdata for storage in weight_storages(self._built)} if WEIGHTS not in self.offloaded else {
            emptied.storage._cdata for emptied in self._emptied[WEIGHTS]}
        state = _distinct(_state_tensors(self._optimizer))
        # Without fp32 copies an optimizer updates the weights themselves.
        return self._move(OPTIMIZER, [storage for storage in state if storage._cdata not in weights])

    def everything(self) -> int:
        """All three. Returns as `weights`; collective as that."""
        return self.gradients() + self.optimizer() + self.weights()

    def bring_back(self, *kinds: str) -> None:
        """Give storages their memory and contents again.

        Args:
            kinds: of `mimo.model.build.KINDS`; none: all that is away.

        Raises:
            ValueError: an unknown kind.
            torch.OutOfMemoryError: the device has no room; what is not back yet stays away and can be asked for again.
        """
        unknown = sorted(set(kinds) - set(KINDS))
        if unknown:
            raise ValueError(f"there is no {', '.join(unknown)} to bring back: known are {', '.join(KINDS)}")
        for kind in KINDS:
            if kind in (kinds or KINDS) and kind in self.offloaded:
                self._fill(kind)

    def _move(self, kind: str, storages: list[torch.UntypedStorage]) -> int:
        if kind in self.offloaded:
            return 0
        device = self._device()
        # CPU tensors of a model on a GPU (step counters) are where they should be.
        emptied = [Held(storage, storage.nbytes()) for storage in storages
                   if storage.device.type == device.type and storage.nbytes()]
        if kind != GRADIENTS:
            self._host.setdefault(kind, HostMemory(pinned=device.type == "cuda")).save(emptied)
        synchronize(device)  # copies, and whatever other streams still do with this memory
        self._built.residency.offloaded.add(kind)
        self._emptied[kind] = emptied
        self._refuse_steps()
        for each in emptied:
            each.storage.resize_(0)
        if device.type == "cuda":
            torch.cuda.empty_cache()  # else this process keeps the memory for itself
        return sum(each.num_bytes for each in emptied)

    @torch.no_grad()
    def _fill(self, kind: str) -> None:
        emptied = self._emptied[kind]
        for each in emptied:
            each.storage.resize_(each.num_bytes)
        if kind == GRADIENTS:
            for each in emptied:
                _bytes_of(each.storage).zero_()
        else:
            self._host[kind].load(emptied)
        synchronize(self._device())
        del self._emptied[kind]
        self._built.residency.offloaded.discard(kind)
        if not self.offloaded:
            self._allow_steps()

    def _device(self) -> torch.device:
        return torch.device("cuda" if torch.cuda.is_available() and any(
            parameter.is_cuda for parameter in self._built.model.parameters()) else "cpu")

    def _refuse_steps(self) -> None:
        """Calls of a step that would write where no memory is raise: Megatron Core does not look."""
        if self._shadowed:
            return
        calls = [(wrapped, "zero_grad_buffer") for wrapped in self._built.wrapped.values()]
        for owner, name in [*calls, (self._optimizer, "step")]:
            self._shadowed.append((owner, name, vars(owner).get(name)))
            setattr(owner, name, self._refusal(name))

    def _allow_steps(self) -> None:
        for owner, name, earlier in self._shadowed:
            if earlier is None:
                delattr(owner, name)
            else:
                setattr(owner, name, earlier)
        self._shadowed = []

    def _refusal(self, name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: self._built.residency.require(f"{name} of a training step", *KINDS)


def weight_storages(built: BuiltModel) -> list[torch.UntypedStorage]:
    """Behind the parameters and buffers of every module of this rank and Megatron Core's buffers of them, each once."""
    return _distinct((*built.model.parameters(), *built.model.buffers(), *(
        buffer.param_data for wrapped in built.wrapped.values() for buffer in _buffers_of(wrapped)
        if buffer.param_data is not None)))


class HostMemory:
    """Host memory for the contents of storages, which lie in it end to end.

    Args:
        pinned: copies are direct; the memory cannot be paged out.
    """

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._blocks: list[torch.Tensor] = []

    def save(self, emptied: list[Held]) -> None:
        """Copy the storages' contents here; done once the device is synchronised."""
        missing = sum(each.num_bytes for each in emptied) - sum(block.numel() for block in self._blocks)
        while missing > 0:
            self._blocks.append(torch.empty(min(missing, BLOCK_BYTES) if not self._blocks else BLOCK_BYTES,
                                            dtype=torch.uint8, pin_memory=self._pinned))
            missing -= self._blocks[-1].numel()
        for here, there in self._pairs(emptied):
            here.copy_(there, non_blocking=self._pinned)

    def load(self, emptied: list[Held]) -> None:
        """Copy them back; done once the device is synchronised."""
        for here, there in self._pairs(emptied):
            there.copy_(here, non_blocking=self._pinned)

    def exchange(self, held: list[Held]) -> None:
        """Contents of the storages that were saved here go here, and those go there; done once it is synchronised.

        Takes memory of the device for a block at a time.
        """
        for here, there in self._pairs(held):
            before = there.clone()
            there.copy_(here, non_blocking=self._pinned)
            here.copy_(before, non_blocking=self._pinned)

    def _pairs(self, emptied: list[Held]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Parts of blocks and of storages that belong together."""
        number = begin = 0
        for each in emptied:
            content, done = _bytes_of(each.storage), 0
            while done < each.num_bytes:
                block = self._blocks[number]
                count = min(each.num_bytes - done, block.numel() - begin)
                yield block[begin:begin + count], content[done:done + count]
                done, begin = done + count, begin + count
                if begin == block.numel():
                    number, begin = number + 1, 0


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """All of a storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _distinct(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """The storages behind tensors, each once."""
    storages: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        storages.setdefault(storage._cdata, storage)
    return list(storages.values())


def _buffers_of(wrapped: Any) -> list[Any]:
    """Megatron Core's contiguous buffers of a module."""
    return [*wrapped.buffers, *wrapped.expert_parallel_buffers]


def _state_tensors(optimizer: HeteroOptimizer) -> Iterator[torch.Tensor]:
    """Everything that the torch (or Transformer Engine) optimizers of this rank update and remember."""
    for info in optimizer.module_infos.values():
        if not info.is_active or info.optimizer is None:
            continue
        for one in vars(info.optimizer).get("chained_optimizers", [info.optimizer]):
            if one.optimizer is not None:
                for group in one.optimizer.param_groups:
                    yield from group["params"]
                for state in one.optimizer.state.values():
                    yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def synchronize(device: torch.device) -> None:
    """Wait for everything that was queued on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()
