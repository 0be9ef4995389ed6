"""Arguments, buffers and recomputation of captured passes, for CUDA graphs of whole decoders and of single layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from mimo.model import compat

# Names of arguments; the last two are parts of `packed_seq_params`.
HIDDEN, PACKED, STARTS, NUMBERS = "hidden_states", "packed_seq_params", "cu_seqlens", "seq_idx"

# Captures the kernels of a function and returns what launches them.
Capture = Callable[[Callable[[], None]], Callable[[], None]]


@dataclass(frozen=True)
class Call:
    """Arguments of a decoder as tensors, those of packed rows included.

    Attributes:
        tensors: the tensors by name.
        others: names of the arguments that are None.
        longest: with packed rows, the longest sequence that kernels have to reckon with; None without.
    """

    tensors: dict[str, torch.Tensor]
    others: tuple[str, ...]
    longest: int | None

    @property
    def num_tokens(self) -> int:
        """Tokens of this rank."""
        return self.tensors[HIDDEN].shape[:-1].numel()

    @classmethod
    def of(cls, inputs: dict[str, Any]) -> Call | None:
        """Take arguments apart. Returns None if graphs cannot have them."""
        packed: PackedSeqParams | None = inputs.get(PACKED)
        tensors = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
        others = tuple(name for name, value in inputs.items() if value is None)
        if packed is None:
            return cls(tensors, others, None) if len(tensors) + len(others) == len(inputs) else None
        if len(tensors) + len(others) + 1 < len(inputs):
            return None
        assert packed.cu_seqlens_q is packed.cu_seqlens_kv and packed.seq_idx is not None, packed
        if packed.max_seqlen_q == packed.seq_idx.shape[-1]:
            return None  # one sequence, see `mimo.model.attention.packed_seq_params`
        return cls({**tensors, STARTS: packed.cu_seqlens_q, NUMBERS: packed.seq_idx}, others, packed.max_seqlen_q)

    @property
    def sequences(self) -> tuple[int, int]:
        """Number of starts of packed sequences and length of the longest one; zeros without packed rows."""
        return (0, 0) if self.longest is None else (len(self.tensors[STARTS]), self.longest)

    def widened(self, num_starts: int, longest: int) -> Call:
        """Return the same call for more and longer packed sequences. Those that are added have no tokens."""
        if self.longest is None:
            return self
        missing, length = num_starts - len(self.tensors[STARTS]), self.tensors[NUMBERS].shape[-1]
        starts = torch.nn.functional.pad(self.tensors[STARTS], (0, missing), value=length)
        return replace(self, tensors=self.tensors | {STARTS: starts}, longest=longest)

    def without_tensors(self) -> Call:
        """Return what `arguments` reads, so that tensors need not be kept for it."""
        return replace(self, tensors={})

    def arguments(self, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        """Put arguments together again, from other tensors of the same names."""
        found: dict[str, Any] = {**tensors, **dict.fromkeys(self.others)}
        if self.longest is not None:
            starts = found.pop(STARTS)
            # Made anew each time, because layers keep on it what they derive from its values.
            found[PACKED] = PackedSeqParams(
                qkv_format="thd", cu_seqlens_q=starts, cu_seqlens_kv=starts, max_seqlen_q=self.longest,
                max_seqlen_kv=self.longest, seq_idx=found.pop(NUMBERS))
        return found


def add_gradients(parameters: Iterable[Any], gradients: Iterable[torch.Tensor | None]) -> None:
    """Add gradients to the `main_grad` of their parameters, except for those that a layer has added itself."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        # Most layers of Transformer Engine have added it inside the matrix product.
        if gradient is not None and not parameter.grad_added_to_main_grad:
            parameter.main_grad.add_(gradient)


# The trainable parameters of what runs to be captured, if anything does.
_CAPTURED: list[Sequence[Any]] = []


@contextmanager
def captured(parameters: Sequence[Any]) -> Iterator[None]:
    """Have layers with these trainable parameters recompute inside of a graph."""
    _CAPTURED.append(parameters)
    try:
        yield
    finally:
        _CAPTURED.pop()


def checkpoint(function: Callable[..., Any], distribute_saved_activations: bool, *args: Any) -> Any:
    """Run a part of a layer that is recomputed in the backward pass: through `_Recomputed` if a graph captures it."""
    if not _CAPTURED:
        return compat.checkpoint(function, distribute_saved_activations, *args)
    assert not distribute_saved_activations, "no flag sets it"
    return _Recomputed.apply(_CAPTURED[-1], function, *args)


class _Recomputed(torch.autograd.Function):
    """Megatron Core's `CheckpointFunction` for layers that draw no random numbers.

    It leaves generators alone, whose states a graph must not read, and adds the gradients of weights itself, because
    hooks of parameters do not run for a graph.
    """

    @staticmethod
    def forward(ctx: Any, parameters: Sequence[Any], function: Callable[..., Any], *args: torch.Tensor | None) -> Any:
        """Run without gradients, and keep the arguments."""
        ctx.parameters, ctx.function = parameters, function
        ctx.save_for_backward(*args)
        return function(*args)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        """Run again with gradients, then backward."""
        args = [None if each is None else each.detach().requires_grad_(each.requires_grad)
                for each in ctx.saved_tensors]
        parameters = ctx.parameters
        with torch.enable_grad(), captured(parameters):  # the function may recompute parts of its own
            outputs = ctx.function(*args)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        used = [(output, gradient) for output, gradient in zip(outputs, gradients, strict=True)
                if gradient is not None and output is not None and output.requires_grad]
        leaves = [each for each in args if each is not None and each.requires_grad]
        found = torch.autograd.grad([output for output, _ in used], [*leaves, *parameters],
                                    [gradient for _, gradient in used], allow_unused=True)
        add_gradients(parameters, found[len(leaves):])
        of_leaves = iter(found)
        return None, None, *(next(of_leaves) if each is not None and each.requires_grad else None for each in args)


class Lease:
    """Occupies a slot until the backward pass is over, or until autograd drops a pass that has none.

    Args:
        busy: the slots in use, to which this one is added.
        slot: its number.
    """

    def __init__(self, busy: set[int], slot: int) -> None:
        self._busy, self._slot, self._holds = busy, slot, True
        busy.add(slot)

    def release(self) -> None:
        """Give the slot back. Only the first call does anything."""
        if self._holds:
            self._busy.discard(self._slot)
        self._holds = False

    __del__ = release


def one_of_each_storage(module: torch.nn.Module) -> list[torch.Tensor]:
    """Return tensors whose addresses change if weights or gradients of a module move, few if they share storages."""
    found: dict[int, torch.Tensor] = {}
    for parameter in module.parameters():
        for tensor in (parameter.data, getattr(parameter, "main_grad", None)):
            if tensor is not None:
                found.setdefault(tensor.untyped_storage().data_ptr(), tensor)
    return list(found.values())


@contextmanager
def without_random_streams() -> Iterator[None]:
    """Have Megatron Core's layers draw from the default generator, whose state a graph can contain; none of them does.

    With sequence parallelism, the decoder switches to another generator around its layers.
    """
    tracker: Any = get_cuda_rng_tracker()
    tracker.fork = lambda *unused: nullcontext()
    try:
        yield
    finally:
        del tracker.fork


def borrowed(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the elements of another one whose memory it does not keep from being used again.

    The allocator may then give the memory to later graphs of the same pool, which write it only while nobody needs
    these elements any more. The pool itself lives as long as one of its graphs.

    Args:
        tensor: a tensor on a GPU, of any strides.
    """
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    assert tensor.numel(), "a microbatch has tokens"
    memory = SimpleNamespace(__cuda_array_interface__={
        "shape": (extent * tensor.element_size(),), "typestr": "|u1", "data": (tensor.data_ptr(), False),
        "strides": None, "version": 2})
    elements = torch.as_tensor(memory, device=tensor.device).view(tensor.dtype)
    return elements.as_strided(tensor.shape, tensor.stride()).detach()


def refuse_copies_from_host(graph: torch.cuda.CUDAGraph) -> None:
    """Raise RuntimeError if a graph copies from the host's memory, which may be gone when the graph is replayed.

    PyTorch captures no copies from memory that is not pinned, but libraries such as cuDNN do.

    Args:
        graph: a captured graph with `keep_graph=True`.
    """
    try:
        from cuda.bindings import runtime  # torch depends on it
    except ImportError:
        return
    kinds = (runtime.cudaMemcpyKind.cudaMemcpyHostToDevice, runtime.cudaMemcpyKind.cudaMemcpyDefault)
    on_host = (runtime.cudaMemoryType.cudaMemoryTypeUnregistered, runtime.cudaMemoryType.cudaMemoryTypeHost)
    _, _, count = runtime.cudaGraphGetNodes(graph.raw_cuda_graph(), 0)
    _, nodes, _ = runtime.cudaGraphGetNodes(graph.raw_cuda_graph(), count)
    copied = []
    for node in nodes:
        if runtime.cudaGraphNodeGetType(node)[1] != runtime.cudaGraphNodeType.cudaGraphNodeTypeMemcpy:
            continue
        copy = runtime.cudaGraphMemcpyNodeGetParams(node)[1]
        if copy.kind in kinds and runtime.cudaPointerGetAttributes(copy.srcPtr.ptr)[1].type in on_host:
            copied.append(copy.extent.width)
    if copied:
        raise RuntimeError(f"--cuda-graphs: layers copy {sum(copied)} bytes in {len(copied)} pieces from the host's "
                           "memory in each pass, and a graph would copy whatever is there later; leave it out")
