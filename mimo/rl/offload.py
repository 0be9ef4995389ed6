"""Hand a trainer's device memory to an engine on the same device, and take it back as it was.

Parameters are views of Megatron's contiguous buffers, optimizers and hooks refer to them by identity, and gradients are
accumulated through other views of other buffers. Therefore storages are emptied and filled again in place, so that
every view, hook and alias stays valid. Moving a parameter's own data elsewhere would leave the buffer behind it alive.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from mimo.compat import storage_key
from mimo.model.build import GRADIENTS, KINDS, OPTIMIZER, WEIGHTS, BuiltModel
from mimo.training.optimizer import HeteroOptimizer

# torch's allocator of pinned memory rounds a block up to a power of two. Blocks of this size waste nothing.
BLOCK_BYTES = 256 << 20


@dataclass(frozen=True)
class Held:
    """A storage and the bytes that it has, or had before it was emptied."""

    storage: torch.UntypedStorage
    num_bytes: int


class Offload:
    """Moves weights, gradient buffers and optimizer state of one rank to host memory and back, each on its own.

    The usual order around a rollout on the same device: `gradients` and `optimizer`, refit, `weights`, rollout,
    `bring_back` of weights and gradients, `prefetch_optimizer`. Weights and optimizer state come back with the same
    bits. Gradients come back as zeros, as at the start of every step. While anything is away, a step raises
    `mimo.model.build.OffloadedError`, and so does everything else that needs what is away: a forward pass, a refit, a
    checkpoint, an export. Call the methods only between steps, and on all ranks that share a module.

    Host memory is pinned on CUDA and kept from one use to the next, because allocating it is slower than the copy.

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
        """Move parameters and buffers of every module, frozen ones included. Collective over each module's ranks.

        Returns:
            Bytes of device memory given back; 0 if they were away already.
        """
        if WEIGHTS in self.offloaded:
            return 0
        self._built.finish_gathers("offloading")
        return self._move(WEIGHTS)

    def gradients(self) -> int:
        """Free the gradient buffers. Return the same as `weights`."""
        # Some gradients are copies, not views of the buffers.
        self._optimizer.zero_grad()
        return self._move(GRADIENTS)

    def optimizer(self, num_bytes: int | None = None) -> int:
        """Move the fp32 copies of weights and the moments of every module. Return the same as `weights`.

        Args:
            num_bytes: move only as many of the storages as give back this much device memory; None: all of them. If
                some are away already, more of them follow.
        """
        return self._move(OPTIMIZER, num_bytes)

    def num_bytes(self, kind: str) -> int:
        """Count the bytes of device memory that one kind has now."""
        return sum(each.num_bytes for each in self._held(kind))

    def everything(self) -> int:
        """Move all three. Return the same as `weights`; collective like it."""
        return self.gradients() + self.optimizer() + self.weights()

    def bring_back(self, *kinds: str) -> None:
        """Give storages their memory and contents again.

        Args:
            kinds: names from `mimo.model.build.KINDS`; without any, everything that is away.

        Raises:
            ValueError: an unknown kind.
            torch.OutOfMemoryError: the device has no room. The rest stays away, and another call can bring it back.
        """
        unknown = sorted(set(kinds) - set(KINDS))
        if unknown:
            raise ValueError(f"there is no {', '.join(unknown)} to bring back: known are {', '.join(KINDS)}")
        for kind in KINDS:
            if kind in (kinds or KINDS):
                self._built.residency.wait_for(kind)
                if kind in self.offloaded:
                    self._fill(kind)

    def prefetch_optimizer(self) -> None:
        """Begin to bring optimizer state back, behind the passes that need none. Whatever needs it waits for it.

        On a GPU a stream of its own copies the state. On a CPU the state is copied when something needs it.

        Raises:
            torch.OutOfMemoryError: as in `bring_back`.
        """
        if OPTIMIZER not in self.offloaded:
            return
        emptied = self._allocate(OPTIMIZER)
        load = partial(self._host[OPTIMIZER].load, emptied)
        copied: torch.cuda.Event | None = None
        if self._device().type == "cuda":
            stream, copied = torch.cuda.Stream(), torch.cuda.Event()
            # Kernels that are queued may still use this memory for what they had there.
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream), torch.no_grad():
                load()
                copied.record()

        def wait() -> None:
            if copied is not None:
                # The host waits, so that no stream can come too early.
                copied.synchronize()
            else:
                with torch.no_grad():
                    load()
            self._allow_steps()

        residency = self._built.residency
        residency.offloaded.discard(OPTIMIZER)
        residency.arriving[OPTIMIZER] = wait

    def _held(self, kind: str) -> list[Held]:
        """List the storages of one kind that have memory on the device."""
        device = self._device()
        if kind == WEIGHTS:
            storages = weight_storages(self._built)
        elif kind == GRADIENTS:
            storages = _distinct(tensor for wrapped in self._built.wrapped.values() for buffer in _buffers_of(wrapped)
                                 for tensor in (buffer.grad_data, *buffer.extra_main_grads))
        else:
            weights = ([held.storage for held in self._emptied[WEIGHTS]] if WEIGHTS in self.offloaded
                       else weight_storages(self._built))
            keys = set(map(storage_key, weights))
            # An optimizer without fp32 copies updates the weights themselves; these are not its state.
            storages = [storage for storage in _distinct(_state_tensors(self._optimizer))
                        if storage_key(storage) not in keys]
        # After an error in `bring_back`, storages that are away may have memory, but not their contents.
        away = {storage_key(each.storage) for each in self._emptied.get(kind, ())}
        # CPU tensors of a model on a GPU, such as step counters, stay where they are.
        return [Held(storage, storage.nbytes()) for storage in storages
                if storage.device.type == device.type and storage.nbytes() and storage_key(storage) not in away]

    def _move(self, kind: str, num_bytes: int | None = None) -> int:
        self._built.residency.wait_for(kind)
        held, given_back = self._held(kind), 0
        if num_bytes == 0 or (kind in self.offloaded and not held):
            return 0
        if num_bytes is None:
            return self._empty(kind, held)
        # Storages may share a segment of torch's allocator, which gives memory back only when all of the segment is
        # free. Therefore the memory that came back counts, and not the sizes of storages.
        while held and given_back < num_bytes:
            ends = list(accumulate(each.num_bytes for each in held))
            count = bisect_left(ends, num_bytes - given_back) + 1
            given_back += self._empty(kind, held[:count])
            held = held[count:]
        return given_back

    def _empty(self, kind: str, emptied: list[Held]) -> int:
        """Move these storages. Return the bytes of device memory given back."""
        device = self._device()
        if kind != GRADIENTS:
            self._host.setdefault(kind, HostMemory(pinned=device.type == "cuda")).save(emptied)
        # The copies must be complete, and no other stream may still use this memory.
        synchronize(device)
        self._built.residency.offloaded.add(kind)
        self._emptied.setdefault(kind, []).extend(emptied)
        self._guard_steps()
        reserved = torch.cuda.memory_reserved() if device.type == "cuda" else 0
        for each in emptied:
            each.storage.resize_(0)
        if device.type == "cuda":
            torch.cuda.empty_cache()  # otherwise torch's allocator keeps the memory for this process
            return reserved - torch.cuda.memory_reserved()
        return sum(each.num_bytes for each in emptied)

    @torch.no_grad()
    def _fill(self, kind: str) -> None:
        emptied = self._allocate(kind)
        if kind == GRADIENTS:
            for each in emptied:
                _bytes_of(each.storage).zero_()
        else:
            self._host[kind].load(emptied)
        synchronize(self._device())
        self._built.residency.offloaded.discard(kind)
        self._allow_steps()

    def _allocate(self, kind: str) -> list[Held]:
        """Give the storages of an offloaded kind memory again, with any contents."""
        for each in self._emptied[kind]:
            if not each.storage.nbytes():  # an earlier call may have given it memory before there was no more
                each.storage.resize_(each.num_bytes)
        return self._emptied.pop(kind)

    def _device(self) -> torch.device:
        return torch.device("cuda" if torch.cuda.is_available() and any(
            parameter.is_cuda for parameter in self._built.model.parameters()) else "cpu")

    def _guard_steps(self) -> None:
        """Have the calls of a step check that their memory is there. Megatron Core does not check for that."""
        if self._shadowed:
            return

        def check_first(kinds: tuple[str, ...], name: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            self._built.residency.require(f"{name} of a training step", *kinds)
            return call(*args, **kwargs)

        calls: list[tuple[Any, str, tuple[str, ...]]] = [
            (wrapped, "zero_grad_buffer", (WEIGHTS, GRADIENTS)) for wrapped in self._built.wrapped.values()]
        calls += [(self._optimizer, name, KINDS) for name in ("prepare", "step")]
        for owner, name, kinds in calls:
            self._shadowed.append((owner, name, vars(owner).get(name)))
            setattr(owner, name, partial(check_first, kinds, name, getattr(owner, name)))

    def _allow_steps(self) -> None:
        """Undo `_guard_steps`, unless something is still away or arriving."""
        if self.offloaded or self._built.residency.arriving:
            return
        for owner, name, earlier in self._shadowed:
            if earlier is None:
                delattr(owner, name)
            else:
                setattr(owner, name, earlier)
        self._shadowed = []


def weight_storages(built: BuiltModel) -> list[torch.UntypedStorage]:
    """Return the storages of this rank's parameters and buffers, Megatron Core's own buffers included, each once."""
    return _distinct((*built.model.parameters(), *built.model.buffers(), *(
        buffer.param_data for wrapped in built.wrapped.values() for buffer in _buffers_of(wrapped)
        if buffer.param_data is not None)))


class HostMemory:
    """Host memory for the contents of storages, stored one after the other.

    Args:
        pinned: lock the memory into RAM, so that copies need no intermediate buffer.
    """

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._blocks: list[torch.Tensor] = []
        self._stored = 0

    def save(self, emptied: list[Held]) -> None:
        """Copy the storages' contents behind those stored before. Complete once the device is synchronised."""
        end = self._stored + sum(each.num_bytes for each in emptied)
        while len(self._blocks) * BLOCK_BYTES < end:
            self._blocks.append(torch.empty(BLOCK_BYTES, dtype=torch.uint8, pin_memory=self._pinned))
        for here, there in self._pairs(emptied, self._stored):
            here.copy_(there, non_blocking=self._pinned)
        self._stored = end

    def load(self, emptied: list[Held]) -> None:
        """Copy the contents of all storages back, in the order of `save`. Complete once the device is synchronised."""
        self._stored = 0
        for here, there in self._pairs(emptied):
            there.copy_(here, non_blocking=self._pinned)

    def exchange(self, held: list[Held]) -> None:
        """Swap the storages' contents with what `save` stored. Complete once the device is synchronised.

        This needs device memory for one block at a time.
        """
        for here, there in self._pairs(held):
            before = there.clone()
            there.copy_(here, non_blocking=self._pinned)
            here.copy_(before, non_blocking=self._pinned)

    def _pairs(self, held: list[Held], begin: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield matching parts of host blocks, from byte `begin` on, and of storages."""
        number, begin = divmod(begin, BLOCK_BYTES)
        for each in held:
            content, done = _bytes_of(each.storage), 0
            while done < each.num_bytes:
                block = self._blocks[number]
                count = min(each.num_bytes - done, block.numel() - begin)
                yield block[begin:begin + count], content[done:done + count]
                done, begin = done + count, begin + count
                if begin == block.numel():
                    number, begin = number + 1, 0


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return all bytes of a storage as a tensor that shares its memory."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _distinct(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """Return the storages behind tensors, each once."""
    storages: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        storages.setdefault(storage_key(storage), storage)
    return list(storages.values())


def _buffers_of(wrapped: Any) -> list[Any]:
    """Return Megatron Core's contiguous buffers of a module."""
    return [*wrapped.buffers, *wrapped.expert_parallel_buffers]


def _state_tensors(optimizer: HeteroOptimizer) -> Iterator[torch.Tensor]:
    """Yield all parameters and state tensors of this rank's torch (or Transformer Engine) optimizers."""
    for one in optimizer.inner_optimizers():
        for group in one.optimizer.param_groups:
            yield from group["params"]
        for state in one.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def synchronize(device: torch.device) -> None:
    """Wait for everything that was queued on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()
