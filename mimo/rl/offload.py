"""Gives a trainer's device memory to an engine on the same device, and takes it back with the same contents.

Parameters are views of Megatron's contiguous buffers, optimizers and hooks refer to them by identity, and gradients are
accumulated through other views of other buffers. Therefore storages are emptied and filled again in place, so that
every view, hook and alias stays valid. Moving a parameter's own data elsewhere would leave the buffer behind it alive.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import torch

from mimo.comm import broadcast_object, gather
from mimo.compat import storage_key
from mimo.grid.groups import Grids
from mimo.model.build import GRADIENTS, KINDS, OPTIMIZER, WEIGHTS, BuiltModel
from mimo.platform.base import Platform
from mimo.rollout.replicas import RolloutClient
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
    """

    def __init__(self, built: BuiltModel, optimizer: HeteroOptimizer) -> None:
        self._built, self._optimizer = built, optimizer
        self._emptied: dict[str, list[Held]] = {}
        self._host: dict[str, HostMemory] = {}
        self._shadowed: list[tuple[Any, str, Any]] = []

    @property
    def offloaded(self) -> frozenset[str]:
        """The kinds of memory, from `mimo.model.build.KINDS`, that are away."""
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
            tensors: list[Any] = []
            for one in self._optimizer.inner_optimizers():
                for group in one.optimizer.param_groups:
                    tensors += group["params"]
                for state in one.optimizer.state.values():
                    tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
            # An optimizer without fp32 copies updates the weights themselves; these are not its state.
            storages = [storage for storage in _distinct(tensors) if storage_key(storage) not in keys]
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


def synchronize(device: torch.device) -> None:
    """Wait for everything that was queued on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()


class Devices:
    """Memory of the devices that engine and trainer use. Here they use different ones, so there is nothing to do.

    `SharedDevices` is for an engine on the trainer's devices. Every method is collective.

    Attributes:
        leaving: bytes of the trainer's optimizer state and weights that left a shared device for the last rollout, by
            name from `mimo.model.build.KINDS`. Of all ranks' numbers, this is the largest.
    """

    leaving: Mapping[str, int] = MappingProxyType({})

    def for_engine_start(self) -> None:
        """Give the engine all the memory it wants, for its start."""

    def for_refit(self) -> None:
        """Make room for the weights of both trainer and engine."""

    def for_rollout(self) -> None:
        """Give the engine all the memory it needs to generate."""

    def for_training(self) -> None:
        """Give the trainer all its memory back. The engine may lose its weights, see `keeps_weights`."""

    @property
    def keeps_weights(self) -> bool:
        """Whether an engine keeps its weights while the trainer trains."""
        return True

    def take_seconds(self) -> float:
        """Return the seconds spent on moving memory since the last call."""
        return 0.0


# Trainer and engine on the same GPUs take turns: each gives the other the memory that it does not need.
#
# The engine sleeps while the trainer trains. It then has neither weights nor a KV cache (vLLM's sleep level 2, because
# each refit brings all weights anyway). For a refit the trainer first frees its gradients and moves optimizer state to
# the host, and the engine takes memory for its weights. Then the trainer's weights go to the host too, and the engine
# takes memory for the KV cache. What has room beside the engine stays: the weights, and as much of the optimizer state
# as possible. The rest comes back while log-probs and the update's passes run, which do not need it. On the CPU, where
# vLLM cannot sleep, only the trainer's memory moves.

# vLLM's names of what a waking engine can take memory for.
ENGINE_WEIGHTS, KV_CACHE = "weights", "kv_cache"
# Fraction of a device that stays free beside the trainer and an engine that uses all of --engine-memory.
SPARE_MEMORY = 0.04


def what_leaves(refit_room: int, rollout_room: int, num_bytes: Mapping[str, int]) -> dict[str, int]:
    """Choose how many bytes of optimizer state and of weights leave a device for a rollout: as few as possible.

    Optimizer state leaves first. It comes back behind passes, which weights cannot. Weights leave wholly or not at all.

    Args:
        refit_room: bytes that would be left in a refit if nothing moved; negative where something has to.
        rollout_room: bytes that would be left in a rollout if nothing moved.
        num_bytes: bytes of optimizer state and of weights. A refit needs the weights in any case.
    """
    state = min(max(0, -refit_room, -rollout_room), num_bytes[OPTIMIZER])
    return {OPTIMIZER: state, WEIGHTS: num_bytes[WEIGHTS] if rollout_room + state < 0 else 0}


class SharedDevices(Devices):
    """Memory of devices that trainer and engine share. Every method is collective over the trainer's world.

    Args:
        grids: process groups.
        offload: moves this rank's memory to the host and back.
        platform: says how much memory the device has.
        engine_memory: fraction of it that the engine may use while it is awake; None for an engine that cannot sleep,
            as on CPUs.
        engine_weight_bytes: bytes of a worker's weights.

    Attributes:
        client: the engine, on the first rank, once it is there.
        seconds: seconds spent on moving memory since the last `take_seconds`.
    """

    def __init__(self, grids: Grids, offload: Offload, platform: Platform, engine_memory: float | None,
                 engine_weight_bytes: float) -> None:
        self.client: RolloutClient | None = None
        self._grids, self._offload, self._platform = grids, offload, platform
        self._engine_memory, self._engine_weight_bytes = engine_memory, engine_weight_bytes
        self.seconds = 0.0

    @property
    def keeps_weights(self) -> bool:
        """Whether an engine keeps its weights while the trainer trains."""
        return self._engine_memory is None

    def for_engine_start(self) -> None:
        """Leave the devices to the engine, which takes all its memory once to see that it is there."""
        self._offload.everything()
        gather(self._grids, None)

    def for_refit(self) -> None:
        """Make room for the weights of both: free gradients, and move optimizer state that has no room to the host."""
        began = time.perf_counter()
        self._offload.gradients()
        # What leaves is chosen for an engine that is awake and uses all the memory it may.
        leaves = {kind: self._offload.num_bytes(kind) for kind in (OPTIMIZER, WEIGHTS)}
        if self._engine_memory is not None:
            free, total = self._platform.device_memory()
            free -= round(SPARE_MEMORY * total)
            leaves = what_leaves(free - round(self._engine_weight_bytes), free - round(self._engine_memory * total),
                                 leaves)
        self._offload.optimizer(leaves[OPTIMIZER])
        # Ranks that share a module have to move its weights together.
        of_ranks = gather(self._grids, leaves)
        self.leaving = {kind: max(rank[kind] for rank in of_ranks) for kind in leaves}
        self._wake_up(ENGINE_WEIGHTS)
        self.seconds += time.perf_counter() - began

    def for_rollout(self) -> None:
        """Make room for the engine's KV cache: the trainer's weights go to the host, too, unless there is room."""
        began = time.perf_counter()
        if self.leaving[WEIGHTS]:
            self._offload.weights()
        gather(self._grids, None)
        self._wake_up(KV_CACHE)
        self.seconds += time.perf_counter() - began

    def for_training(self) -> None:
        """Put the engine to sleep and bring the trainer's memory back; optimizer state arrives behind passes."""
        began = time.perf_counter()
        if self.client is not None and self._engine_memory is not None:
            self.client.sleep()
        broadcast_object(self._grids, None)
        self._offload.bring_back(WEIGHTS, GRADIENTS)
        self._offload.prefetch_optimizer()
        self.seconds += time.perf_counter() - began

    def take_seconds(self) -> float:
        """Return `seconds` and reset them."""
        taken, self.seconds = self.seconds, 0.0
        return taken

    def _wake_up(self, tag: str) -> None:
        if self.client is not None and self._engine_memory is not None:
            self.client.wake_up(tag)
        broadcast_object(self._grids, None)
