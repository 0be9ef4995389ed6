"""CUDA graphs of a decoder: one launch for all kernels of its layers.

With short rows, tensor parallelism or experts, kernels are shorter than the host needs to launch them, and the GPU
waits. A graph captures the kernels of a pass once and launches them together. The layers of a decoder have two graphs
for each shape of their input: one of the forward pass, and one of the backward pass, which also adds weight gradients
to `main_grad`. Embeddings, the output layer and the loss stay outside, and so do passes without gradients.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import unwrap_model

from mimo.grid.groups import Grids
from mimo.model import compat
from mimo.model.fp8 import LastingCopies
from mimo.model.packed_experts import PackedLinear
from mimo.platform import current_platform

logger = logging.getLogger(__name__)

# Most shapes that get graphs, because every graph takes the host's time once and memory for good.
MAX_SHAPES = 64
# A pass without graphs gets this multiple of the memory of captured passes.
ROOM = 1.25
# Names of arguments; the last two are parts of `packed_seq_params`.
HIDDEN, PACKED, STARTS, NUMBERS = "hidden_states", "packed_seq_params", "cu_seqlens", "seq_idx"


def replay_decoder(language: torch.nn.Module, grids: Grids, device: torch.device, impl: str) -> None:
    """Have the decoder of a language model replay its passes from CUDA graphs, until its process groups are destroyed.

    Args:
        language: the built language model, in `DistributedDataParallel` if it trains. The caller has left CUDA's
            default stream before it built the model (`Platform.leave_default_stream`).
        grids: its process groups.
        device: its device. On a CPU, a replay calls the layers again with the same buffers, for tests.
        impl: implementation of its layers.

    Raises:
        ValueError: the model has a part that graphs cannot contain.
    """
    model: Any = unwrap_model(language)
    reason = _unsupported_reason(model, impl if device.type == "cuda" else None)
    if reason:
        raise ValueError(f"--cuda-graphs: {reason}; leave it out")
    decoder = model.decoder
    if model.config.recompute_granularity is not None:
        compat.replace_checkpoint(_checkpoint)
    graphs = _DecoderGraphs(decoder, language if isinstance(language, DistributedDataParallel) else None, device)
    decoder.forward = graphs
    # NCCL destroys a communicator only after all graphs with its collectives.
    grids.before_destroy(graphs.drop)


def _unsupported_reason(model: Any, impl: str | None) -> str:
    """Return why the passes of a model cannot be captured; `impl` is None on a CPU, which captures nothing."""
    decoder = getattr(model, "decoder", None)
    if decoder is None:
        return f"{type(model).__name__} has no `decoder` whose passes could be captured"
    config: TransformerConfig = model.config
    if (config.hidden_dropout or config.attention_dropout or config.moe_input_jitter_eps
            or config.moe_router_force_load_balancing):
        return "dropout and random routing draw numbers, which a replay would repeat"
    if config.multi_latent_attention:
        return "latent attention keeps rotary positions in a cache that may move them"
    if impl == "local":
        return "layers in plain PyTorch (--transformer-impl local) use buffers that move"
    experts: list[Any] = [part.experts for part in decoder.modules() if isinstance(part, MoELayer)]
    if impl is not None and not all(
            isinstance(each, TEGroupedMLP) and isinstance(each.linear_fc1.forward, PackedLinear) for each in experts):
        return "the host waits for the number of tokens of each expert, because --moe-gemm packed cannot run here"
    return ""


class _DecoderGraphs:
    """Replaces the `forward` method of a decoder.

    Until one microbatch of a shape has been through both passes without graphs, others of its shape run without them,
    too, so that kernels are compiled, planned and timed outside of one. The next one is captured. A graph reads and
    writes the same addresses in every replay, so microbatches that are between their forward and backward passes at the
    same time (in a pipeline) need graphs of their own: each takes a free slot. The graphs of a slot share their memory,
    because no two of its microbatches overlap.

    Args:
        decoder: the layers.
        wrapper: `DistributedDataParallel` around the language model; None if nothing of it trains.
        device: device of the layers.
    """

    def __init__(self, decoder: Any, wrapper: DistributedDataParallel | None, device: torch.device) -> None:
        self.decoder, self.wrapper, self.device = decoder, wrapper, device
        self.run = decoder.forward
        self.parameters = [parameter for parameter in decoder.parameters() if parameter.requires_grad]
        self._watched = _one_of_each_storage(decoder)
        # The stream of the parameters in autograd (`Platform.leave_default_stream`).
        self._stream = torch.cuda.current_stream() if device.type == "cuda" else None
        # Gives the output a gradient if no input has one.
        self._anchor = torch.zeros((), device=device, requires_grad=True)
        # Shapes that have run without graphs, and those whose backward pass is over.
        self._seen: set[Any] = set()
        self._warm: set[Any] = set()
        self._copies: LastingCopies | None = None
        self.drop()

    def drop(self) -> None:
        """Drop all graphs. Those of microbatches in flight live until their backward passes."""
        if self._stream is not None:
            torch.cuda.synchronize()  # the last replays may still run
        self._addresses = [tensor.data_ptr() for tensor in self._watched]
        self._passes: dict[tuple[Any, int], _Passes] = {}
        self._busy: set[int] = set()
        # Memory of the graphs by slot: its handle, its bytes, and those that the allocator takes to be free, because
        # only replays use them.
        self._pools: dict[int, Any] = {}
        self._bytes: Counter[int] = Counter()
        self._bytes_of_replays: Counter[int] = Counter()
        current_platform().set_memory_of_replays(0)
        self._most_tokens = 0
        self._is_full = False

    def __call__(self, **inputs: Any) -> torch.Tensor:
        """Run or replay the forward pass of the layers.

        Args:
            inputs: arguments of the decoder's own method.
        """
        if not self.decoder.pre_process:
            inputs[HIDDEN] = self.decoder.input_tensor
        call = _Call.of(inputs)
        key = self._key(call)
        if call is None or key is None:
            output: torch.Tensor = self.run(**inputs)
            return output
        if self._copies is not None:
            self._copies.renew()
        if self._addresses != [tensor.data_ptr() for tensor in self._watched]:
            # Weights or gradients have been offloaded and are back somewhere else.
            self.drop()
        if key not in self._warm or not self._may_have_graphs(key):
            if key not in self._seen:
                self._seen.add(key)
                self._make_room(call.num_tokens)
            output = self.run(**inputs)
            self._copies = self._copies or LastingCopies(self.decoder)
            output.register_hook(lambda gradient: compat.after_backward(lambda: self._warm.add(key)))
            return output
        slot = next(number for number in range(len(self._busy) + 1) if number not in self._busy)
        lease = _Lease(self._busy, slot)
        passes = self._passes.get((key, slot))
        if passes is None:
            passes = self._passes[key, slot] = self._capture(call, slot)
        result: torch.Tensor = _Replay.apply(passes, lease, self._anchor, *call.tensors.values())
        return result

    def _key(self, call: _Call | None) -> Any:
        """Return what the graphs depend on, or None if this pass runs without them."""
        if call is None or not torch.is_grad_enabled() or self._reduces() or self._gathers():
            return None
        if not self.parameters and not call.tensors[HIDDEN].requires_grad:
            return None
        return (self.decoder.training, call.longest, *(
            (name, value.shape, value.dtype, value.requires_grad) for name, value in call.tensors.items()))

    def _may_have_graphs(self, key: Any) -> bool:
        captured = {shape for shape, _ in self._passes}
        if key in captured or len(captured) < MAX_SHAPES:
            return True
        if not self._is_full:
            logger.info("CUDA graphs: %d shapes have graphs; others run without them", MAX_SHAPES)
        self._is_full = True
        return False

    def _make_room(self, num_tokens: int) -> None:
        """Drop all graphs if a pass of so many tokens might not find room beside their memory.

        Collective over the tensor-parallel ranks if they have graphs, because NCCL wants either all of them to replay a
        collective or none. They see the same shapes at the same time.
        """
        if self._stream is None or not self._passes:
            return
        needed = ROOM * max(self._bytes.values()) * max(num_tokens / self._most_tokens, 1.0)
        cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated() - self._bytes.total()
        is_short = torch.tensor(int(torch.cuda.mem_get_info()[0] + cached < needed), device=self.device)
        dist.all_reduce(is_short, op=dist.ReduceOp.MAX, group=self.decoder.pg_collection.tp)
        if is_short.item():
            logger.info("CUDA graphs: dropped %d, because a new length of rows needs their memory", len(self._passes))
            self.drop()
            torch.cuda.empty_cache()

    def _reduces(self) -> bool:
        """Return whether gradient reductions start during the coming backward pass, parameter by parameter."""
        wrapper = self.wrapper
        return wrapper is not None and wrapper.ddp_config.overlap_grad_reduce and any(
            group.is_last_microbatch for group in wrapper.bucket_groups + wrapper.expert_parallel_bucket_groups)

    def _gathers(self) -> bool:
        """Return whether weights are still being gathered, for which hooks of the layers wait one by one."""
        wrapper = self.wrapper
        return wrapper is not None and wrapper.ddp_config.overlap_param_gather and any(
            not group.param_gather_dispatched or group.param_gather_handle is not None
            for group in wrapper.bucket_groups + wrapper.expert_parallel_bucket_groups)

    def register_gradients(self) -> None:
        """Tell overlapped reductions that the gradients of the layers are ready, which parameter hooks do otherwise.

        Without pipeline stages, the last microbatch of a step runs without a graph (`_reduces`). Later stages learn
        only after the forward pass that it was the last one.
        """
        wrapper = self.wrapper
        if wrapper is None or not wrapper.ddp_config.overlap_grad_reduce:
            return
        for parameter in reversed(self.parameters):
            wrapper.param_to_bucket_group[parameter].register_grad_ready(parameter, wrapper.force_all_reduce)

    def _capture(self, call: _Call, slot: int) -> _Passes:
        if self._stream is None:
            return _Passes(self, call, lambda function: function)
        if slot not in self._pools:
            self._pools[slot] = torch.cuda.graph_pool_handle()

        def capture(function: Callable[[], None]) -> Callable[[], None]:
            graph = torch.cuda.CUDAGraph()
            # Other threads, such as NCCL's watchdog and those that pin memory, may call CUDA meanwhile.
            with torch.cuda.graph(graph, pool=self._pools[slot], stream=self._stream,
                                  capture_error_mode="thread_local"):
                function()
            replay: Callable[[], None] = graph.replay
            return replay

        # The allocator counts what is captured, also if it lies in memory of earlier graphs.
        current_platform().set_memory_of_replays(self._bytes_of_replays.total() - self._bytes_of_replays[slot])
        torch.cuda.empty_cache()
        reserved, allocated = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
        with _without_random_streams():
            passes = _Passes(self, call, capture)
            passes.capture_backward(capture)
        reserved, allocated = torch.cuda.memory_reserved() - reserved, torch.cuda.memory_allocated() - allocated
        self._bytes[slot] += reserved
        self._bytes_of_replays[slot] += reserved - allocated
        current_platform().set_memory_of_replays(self._bytes_of_replays.total())
        self._most_tokens = max(self._most_tokens, call.num_tokens)
        logger.info("CUDA graphs of %d tokens (microbatch %d in flight): captured, %d shapes so far, %.1f GiB",
                    call.num_tokens, slot, len(self._seen), self._bytes.total() / 2**30)
        return passes


@dataclass(frozen=True)
class _Call:
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
    def of(cls, inputs: dict[str, Any]) -> _Call | None:
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
            return None  # one sequence, see `mimo.model.packed_attention.packed_seq_params`
        return cls({**tensors, STARTS: packed.cu_seqlens_q, NUMBERS: packed.seq_idx}, others, packed.max_seqlen_q)

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


class _Passes:
    """The captured passes of one shape of input, and the buffers between them and the rest of the model.

    Args:
        graphs: the decoder.
        call: arguments of the pass that is captured.
        capture: captures the kernels of a function and returns what launches them.
    """

    def __init__(self, graphs: _DecoderGraphs, call: _Call,
                 capture: Callable[[Callable[[], None]], Callable[[], None]]) -> None:
        self._graphs, self._call = graphs, call
        self._inputs = {name: torch.empty_like(value).requires_grad_(value.requires_grad)
                        for name, value in call.tensors.items()}
        self._buffers = list(self._inputs.values())
        self._leaves = [buffer for buffer in self._buffers if buffer.requires_grad]
        self._output: torch.Tensor | None = None
        self._of_output: torch.Tensor | None = None
        self._of_leaves: list[torch.Tensor | None] = []
        # The contents matter if a kernel reads sizes or positions from the device.
        self._fill(call.tensors.values())
        self._launch_forward = capture(self._run_forward)
        self._launch_backward: Callable[[], None] = self._run_backward

    def capture_backward(self, capture: Callable[[Callable[[], None]], Callable[[], None]]) -> None:
        """Capture the backward pass, and drop the autograd graph that led to it."""
        assert self._output is not None, "the forward pass is captured first"
        self._of_output = torch.empty_like(self._output)
        for parameter in self._graphs.parameters:
            parameter.grad_added_to_main_grad = False
        self._launch_backward = capture(self._run_backward)
        self._output = self._output.detach()

    def _fill(self, tensors: Iterable[torch.Tensor]) -> None:
        with torch.no_grad():
            for buffer, tensor in zip(self._buffers, tensors, strict=True):
                buffer.copy_(tensor)

    def _run_forward(self) -> None:
        graphs = self._graphs
        if not graphs.decoder.pre_process:
            graphs.decoder.set_input_tensor(self._inputs[HIDDEN])
        with torch.enable_grad(), _captured(graphs):
            self._output = graphs.run(**self._call.arguments(self._inputs))

    def _run_backward(self) -> None:
        parameters = self._graphs.parameters
        assert self._output is not None and self._of_output is not None, "a backward pass follows a forward pass"
        found = torch.autograd.grad(self._output, [*self._leaves, *parameters], self._of_output, allow_unused=True)
        self._of_leaves = list(found[:len(self._leaves)])
        _add_gradients(parameters, found[len(self._leaves):])

    def forward(self, tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Replay the forward pass on `tensors`, one for each buffer. The output is valid until the backward pass."""
        self._fill(tensors)
        self._launch_forward()
        assert self._output is not None
        return self._output.detach()

    def backward(self, gradient: torch.Tensor) -> list[torch.Tensor | None]:
        """Replay the backward pass from the gradient of the output; return one gradient for each buffer, or None."""
        if self._of_output is None:
            self._of_output = torch.empty_like(gradient)
        self._of_output.copy_(gradient)
        self._launch_backward()
        # Copies, because autograd may keep a gradient beyond the next replay.
        found = iter([None if each is None else each.clone() for each in self._of_leaves])
        self._graphs.register_gradients()
        return [next(found) if buffer.requires_grad else None for buffer in self._buffers]


def _add_gradients(parameters: Iterable[Any], gradients: Iterable[torch.Tensor | None]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        # Most layers of Transformer Engine have added it inside the matrix product.
        if gradient is not None and not parameter.grad_added_to_main_grad:
            parameter.main_grad.add_(gradient)


# The decoder whose layers run to be captured, if any do.
_CAPTURED: list[_DecoderGraphs] = []


@contextmanager
def _captured(graphs: _DecoderGraphs) -> Iterator[None]:
    _CAPTURED.append(graphs)
    try:
        yield
    finally:
        _CAPTURED.pop()


def _checkpoint(function: Callable[..., Any], distribute_saved_activations: bool, *args: Any) -> Any:
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
    def forward(ctx: Any, graphs: _DecoderGraphs, function: Callable[..., Any], *args: torch.Tensor | None) -> Any:
        """Run without gradients, and keep the arguments."""
        ctx.graphs, ctx.function = graphs, function
        ctx.save_for_backward(*args)
        return function(*args)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        """Run again with gradients, then backward."""
        args = [None if each is None else each.detach().requires_grad_(each.requires_grad)
                for each in ctx.saved_tensors]
        with torch.enable_grad(), _captured(ctx.graphs):  # the function may recompute parts of its own
            outputs = ctx.function(*args)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        used = [(output, gradient) for output, gradient in zip(outputs, gradients, strict=True)
                if gradient is not None and output is not None and output.requires_grad]
        leaves = [each for each in args if each is not None and each.requires_grad]
        parameters = ctx.graphs.parameters
        found = torch.autograd.grad([output for output, _ in used], [*leaves, *parameters],
                                    [gradient for _, gradient in used], allow_unused=True)
        _add_gradients(parameters, found[len(leaves):])
        of_leaves = iter(found)
        return None, None, *(next(of_leaves) if each is not None and each.requires_grad else None for each in args)


class _Lease:
    """Occupies a slot until the backward pass is over, or until autograd drops a pass that has none."""

    def __init__(self, busy: set[int], slot: int) -> None:
        self._busy, self._slot, self._holds = busy, slot, True
        busy.add(slot)

    def release(self) -> None:
        if self._holds:
            self._busy.discard(self._slot)
        self._holds = False

    __del__ = release


class _Replay(torch.autograd.Function):
    """Both passes of a decoder as one node."""

    @staticmethod
    def forward(ctx: Any, passes: _Passes, lease: _Lease, anchor: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        """Replay the forward pass. `anchor` has a gradient even if no other input has."""
        ctx.passes, ctx.lease = passes, lease
        return passes.forward(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Replay the backward pass."""
        found = ctx.passes.backward(gradients[0])
        ctx.lease.release()
        return None, None, None, *found


def _one_of_each_storage(module: torch.nn.Module) -> list[torch.Tensor]:
    """Return tensors whose addresses change if weights or gradients of a module move, few if they share storages."""
    found: dict[int, torch.Tensor] = {}
    for parameter in module.parameters():
        for tensor in (parameter.data, getattr(parameter, "main_grad", None)):
            if tensor is not None:
                found.setdefault(tensor.untyped_storage().data_ptr(), tensor)
    return list(found.values())


@contextmanager
def _without_random_streams() -> Iterator[None]:
    """Have Megatron Core's layers draw from the default generator, whose state a graph can contain; none of them does.

    With sequence parallelism, the decoder switches to another generator around its layers.
    """
    tracker: Any = get_cuda_rng_tracker()
    tracker.fork = lambda *unused: nullcontext()
    try:
        yield
    finally:
        del tracker.fork
