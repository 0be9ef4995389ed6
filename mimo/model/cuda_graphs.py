"""CUDA graphs of a decoder: one launch for all kernels of its layers.

With short rows, tensor parallelism or experts, kernels are shorter than the host needs to launch them, and the GPU
waits. A graph captures the kernels of a pass once and launches them together. The layers of a decoder have two graphs
for each shape of their input: one of the forward pass, and one of the backward pass, which also adds weight gradients
to `main_grad`. Embeddings, the output layer and the loss stay outside, and so do passes without gradients.

If the ranks exchange tokens of experts, the host has to know how many, and each layer has graphs of its own for what
comes before (`mimo.model.layer_graphs`). With --moe-static-rows the host need not know, and whole passes are captured
with their exchange. NCCL wants either all ranks of a collective to replay it or none, so these ranks then agree on the
shape of their microbatches before each pass.
"""

from __future__ import annotations

import logging
import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import unwrap_model

from mimo.grid.groups import HOST_TIMEOUT, Grids
from mimo.model import compat
from mimo.model.fp8 import LastingCopies
from mimo.model.graph_parts import (
    HIDDEN,
    STARTS,
    Call,
    Capture,
    Lease,
    add_gradients,
    captured,
    checkpoint,
    one_of_each_storage,
    refuse_copies_from_host,
    without_random_streams,
)
from mimo.model.layer_graphs import PassesOfLayers, SplitLayers, unsplittable_reason
from mimo.model.packed_experts import PackedLinear
from mimo.platform import current_platform

logger = logging.getLogger(__name__)

# Most shapes that get graphs, because every graph takes the host's time once and memory for good.
MAX_SHAPES = 64
# A pass without graphs gets this multiple of the memory of captured passes.
ROOM = 1.25
# With cuDNN up to this version, the backward pass of attention masks the end of rows whose length is no multiple of
# 128. Its frontend copies the lengths from the host's memory for this (`workaround_padding_mask_seq_len_q`), and a
# replay would read that memory after it has been freed.
LAST_CUDNN_WITH_MASK, MASK_MULTIPLE = (9, 15, 0), 128


def replay_decoder(language: torch.nn.Module, grids: Grids, device: torch.device, impl: str, *,
                   static_rows: bool = False) -> None:
    """Have the decoder of a language model replay its passes from CUDA graphs, until its process groups are destroyed.

    Args:
        language: the built language model, in `DistributedDataParallel` if it trains. The caller has left CUDA's
            default stream before it built the model (`Platform.leave_default_stream`).
        grids: its process groups.
        device: its device. On a CPU, a replay calls the layers again with the same buffers, for tests.
        impl: implementation of its layers.
        static_rows: whether the host need not know how many tokens ranks exchange.

    Raises:
        ValueError: the model has a part that graphs cannot contain.
    """
    model: Any = unwrap_model(language)
    reason = _unsupported_reason(model, impl if device.type == "cuda" else None, static_rows=static_rows)
    if reason:
        raise ValueError(f"--cuda-graphs: {reason}; leave it out")
    decoder = model.decoder
    exchanges = _exchanges_tokens(decoder)
    if model.config.recompute_granularity is not None:
        compat.replace_checkpoint(checkpoint)
    graphs = _DecoderGraphs(decoder, language if isinstance(language, DistributedDataParallel) else None, device,
                            SplitLayers(decoder) if exchanges and not static_rows else None,
                            _group_of_peers(grids) if exchanges and static_rows else None)
    decoder.forward = graphs
    # NCCL destroys a communicator only after all graphs with its collectives.
    grids.before_destroy(graphs.drop)


def _group_of_peers(grids: Grids) -> dist.ProcessGroup:
    """Create a gloo group of the ranks that take part in the collectives inside of this rank's layers.

    They are neighbours: those of a tensor-parallel group, and those that exchange tokens. Collective over them.
    """
    spec = grids.layout.language
    size = math.lcm(spec.tp, spec.ep * spec.expt_tp)
    first = spec.offset + (grids.rank - spec.offset) // size * size
    group: dist.ProcessGroup = dist.new_group(list(range(first, first + size)), timeout=HOST_TIMEOUT, backend="gloo",
                                              use_local_synchronization=True)
    grids.before_destroy(lambda: dist.destroy_process_group(group))
    return group


def _unsupported_reason(model: Any, impl: str | None, *, static_rows: bool) -> str:
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
    if _exchanges_tokens(decoder) and not static_rows:
        return unsplittable_reason(decoder)
    experts: list[Any] = [part.experts for part in decoder.modules() if isinstance(part, MoELayer)]
    if impl is not None and not all(
            isinstance(each, TEGroupedMLP) and isinstance(each.linear_fc1.forward, PackedLinear) for each in experts):
        return "the host waits for the number of tokens of each expert, because --moe-gemm packed cannot run here"
    return ""


def _exchanges_tokens(decoder: Any) -> bool:
    """Return whether tokens of a decoder's layers go to experts on other ranks."""
    dispatchers: list[Any] = [part.token_dispatcher for part in decoder.modules() if isinstance(part, MoELayer)]
    return any(each.ep_size * each.tp_size > 1 for each in dispatchers)


class _DecoderGraphs:
    """Replaces the `forward` method of a decoder.

    Until one microbatch of a shape has been through both passes without graphs, others of its shape run without them,
    too, so that kernels are compiled and tuned outside a capture. The next one is captured. A graph reads and
    writes the same addresses in every replay, so microbatches that are between their forward and backward passes at the
    same time (in a pipeline) need graphs of their own: each takes a free slot. The graphs of a slot share their memory,
    because no two of its microbatches overlap.

    Args:
        decoder: the layers.
        wrapper: `DistributedDataParallel` around the language model; None if nothing of it trains.
        device: device of the layers.
        layers: the layers, if each has graphs of its own.
        peers: gloo group of ranks that have to replay passes together; None if they see the same shapes anyway.
    """

    def __init__(self, decoder: Any, wrapper: DistributedDataParallel | None, device: torch.device,
                 layers: SplitLayers | None, peers: dist.ProcessGroup | None) -> None:
        self.decoder, self.wrapper, self.device, self.layers = decoder, wrapper, device, layers
        self._peers = peers
        self.run = decoder.forward
        self.parameters = [parameter for parameter in decoder.parameters() if parameter.requires_grad]
        self._watched = one_of_each_storage(decoder)
        # The stream of the parameters in autograd (`Platform.leave_default_stream`).
        self._stream = torch.cuda.current_stream() if device.type == "cuda" else None
        # Gives the output a gradient if no input has one.
        self._anchor = torch.zeros((), device=device, requires_grad=True)
        # Shapes that have been through both passes without graphs.
        self._warm: set[Any] = set()
        self._copies: LastingCopies | None = None
        # Lengths of rows have to be multiples of this for graphs.
        self._row_multiple = 1
        if device.type == "cuda":
            from transformer_engine.pytorch.utils import get_cudnn_version

            self._row_multiple = MASK_MULTIPLE if get_cudnn_version() <= LAST_CUDNN_WITH_MASK else 1
        self._explained: set[str] = set()
        self.drop()

    def drop(self) -> None:
        """Drop all graphs. Those of microbatches in flight live until their backward passes."""
        if self._stream is not None:
            torch.cuda.synchronize()  # the last replays may still run
        self._addresses = [tensor.data_ptr() for tensor in self._watched]
        self._passes: dict[tuple[Any, int], _Passes | PassesOfLayers] = {}
        self._busy: set[int] = set()
        # Memory of the graphs by slot: its handle, its bytes, and those that the allocator takes to be free, because
        # only replays use them.
        self._pools: dict[int, Any] = {}
        self._bytes: Counter[int] = Counter()
        self._bytes_of_replays: Counter[int] = Counter()
        current_platform().set_memory_of_replays(0)
        self._most_tokens = 0

    def __call__(self, **inputs: Any) -> torch.Tensor:
        """Run or replay the forward pass of the layers.

        Args:
            inputs: arguments of the decoder's own method.
        """
        if not self.decoder.pre_process:
            inputs[HIDDEN] = self.decoder.input_tensor
        call = Call.of(inputs)
        if self._peers is not None:
            call = self._agree(call, self._peers)
            inputs = inputs if call is None else call.arguments(call.tensors)
        key = self._key(call)
        if call is None or key is None:
            output: torch.Tensor = self.run(**inputs)
            return output
        if self._copies is not None:
            self._copies.renew()
        if self._addresses != [tensor.data_ptr() for tensor in self._watched]:
            # Weights or gradients have been offloaded and are back somewhere else.
            self.drop()
        if key not in self._warm:
            self._make_room(call.num_tokens)
        if key not in self._warm or not self._may_have_graphs(key, call):
            output = self.run(**inputs)
            self._copies = self._copies or LastingCopies(self._captured_modules())
            output.register_hook(lambda gradient: compat.after_backward(lambda: self._warm.add(key)))
            return output
        slot = next(number for number in range(len(self._busy) + 1) if number not in self._busy)
        lease = Lease(self._busy, slot)
        passes = self._passes.get((key, slot))
        if passes is None:
            passes = self._passes[key, slot] = self._capture(call, slot)
        return passes.replay(inputs, call, lease, self._anchor)

    def _agree(self, call: Call | None, peers: dist.ProcessGroup) -> Call | None:
        """Return this rank's call with as many and as long packed sequences as any peer has.

        Collective over the peers. Returns None if their calls differ in anything else, so that all run without graphs.
        """
        key = self._key(call)
        rest = None if key is None else [key[0], *(part for part in key[2:] if part[0] != STARTS)]
        own = torch.tensor([zlib.crc32(repr(rest).encode()), *((0, 0) if call is None else call.sequences)])
        found = [torch.empty_like(own) for _ in range(peers.size())]
        dist.all_gather(found, own, group=peers)
        if any(each[0] != own[0] for each in found):
            return None
        _, *most = torch.stack(found).amax(dim=0).tolist()
        return call if call is None or key is None else call.widened(*most)

    def _captured_modules(self) -> Iterable[torch.nn.Module]:
        return self.decoder.modules() if self.layers is None else self.layers.captured_modules()

    def _key(self, call: Call | None) -> Any:
        """Return what the graphs depend on, or None if this pass runs without them."""
        if call is None or not torch.is_grad_enabled() or self._reduces() or self._gathers():
            return None
        if not self.parameters and not call.tensors[HIDDEN].requires_grad:
            return None
        if self.layers is not None and any(
                value.requires_grad for name, value in call.tensors.items() if name != HIDDEN):
            return None  # layers share these
        return (self.decoder.training, call.longest, *(
            (name, value.shape, value.dtype, value.requires_grad) for name, value in call.tensors.items()))

    def _may_have_graphs(self, key: Any, call: Call) -> bool:
        captured = {shape for shape, _ in self._passes}
        if key in captured:
            return True
        tokens = call.tensors[HIDDEN].shape[0]
        if self.decoder.config.sequence_parallel:
            tokens *= self.decoder.pg_collection.tp.size()
        if call.longest is None and tokens % self._row_multiple:
            self._explain(f"rows whose length is no multiple of {self._row_multiple} run without them, because this "
                          "version of cuDNN copies from the host's memory for these; install cuDNN 9.15.1 or newer, or "
                          f"have --seq-length / --row-lengths be a multiple of {self._row_multiple}")
            return False
        if len(captured) >= MAX_SHAPES:
            self._explain(f"{MAX_SHAPES} shapes have graphs; others run without them")
            return False
        return True

    def _explain(self, reason: str) -> None:
        """Log why a pass runs without graphs, once for each reason."""
        if reason not in self._explained:
            logger.info("CUDA graphs: %s", reason)
        self._explained.add(reason)

    def _make_room(self, num_tokens: int) -> None:
        """Drop all graphs if a pass of so many tokens might not find room beside their memory.

        Collective over the peers or the tensor-parallel ranks if they have graphs, because NCCL wants either all ranks
        of a collective to replay it or none. They see the same shapes at the same time.
        """
        if self._stream is None or not self._passes:
            return
        needed = ROOM * max(self._bytes.values()) * max(num_tokens / self._most_tokens, 1.0)
        cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated() - self._bytes.total()
        is_short = torch.tensor(int(torch.cuda.mem_get_info()[0] + cached < needed))
        group, device = (self.decoder.pg_collection.tp, self.device) if self._peers is None else (self._peers, "cpu")
        is_short = is_short.to(device)
        dist.all_reduce(is_short, op=dist.ReduceOp.MAX, group=group)
        if is_short.item():
            logger.info("CUDA graphs: dropped those of %d shapes, because a new length of rows needs their memory",
                        len({shape for shape, _ in self._passes}))
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

    def register_gradients(self, parameters: Sequence[Any]) -> None:
        """Tell overlapped reductions that gradients from a graph are ready, which hooks of parameters do otherwise.

        Without pipeline stages, the last microbatch of a step runs without a graph (`_reduces`). Later stages learn
        only after the forward pass that it was the last one.
        """
        wrapper = self.wrapper
        if wrapper is None or not wrapper.ddp_config.overlap_grad_reduce:
            return
        for parameter in reversed(parameters):
            wrapper.param_to_bucket_group[parameter].register_grad_ready(parameter, wrapper.force_all_reduce)

    def _capture(self, call: Call, slot: int) -> _Passes | PassesOfLayers:
        """Return passes of a shape that are captured, now or when they first run."""
        if self._stream is None:
            return (_Passes(self, call, lambda function: function) if self.layers is None else
                    PassesOfLayers(self.layers, self.run, call, self.register_gradients, None))
        if slot not in self._pools:
            self._pools[slot] = torch.cuda.graph_pool_handle()

        def capture(function: Callable[[], None]) -> Callable[[], None]:
            graph = torch.cuda.CUDAGraph(keep_graph=True)
            # Other threads, such as NCCL's watchdog and those that pin memory, may call CUDA meanwhile.
            with torch.cuda.graph(graph, pool=self._pools[slot], stream=self._stream,
                                  capture_error_mode="thread_local"):
                function()
            refuse_copies_from_host(graph)
            graph.instantiate()
            replay: Callable[[], None] = graph.replay
            return replay

        num_tokens = call.num_tokens
        if self.layers is not None:
            return PassesOfLayers(self.layers, self.run, call, self.register_gradients, (
                capture, lambda: self._counted(slot), lambda: self._counted_all(num_tokens, slot)))
        with self._counted_all(num_tokens, slot), self._counted(slot):
            passes = _Passes(self, call, capture)
            passes.capture_backward(capture)
        return passes

    @contextmanager
    def _counted_all(self, num_tokens: int, slot: int) -> Iterator[None]:
        """Report the memory of everything that is captured inside for a shape, in `_counted`."""
        # The allocator counts what is captured, also if it lies in memory of earlier graphs.
        current_platform().set_memory_of_replays(self._bytes_of_replays.total() - self._bytes_of_replays[slot])
        yield
        current_platform().set_memory_of_replays(self._bytes_of_replays.total())
        self._most_tokens = max(self._most_tokens, num_tokens)
        logger.info("CUDA graphs of %d tokens (microbatch %d in flight): captured; all graphs take %.1f GiB",
                    num_tokens, slot, self._bytes.total() / 2**30)

    @contextmanager
    def _counted(self, slot: int) -> Iterator[None]:
        """Count the memory that is captured inside for a slot. Nothing else may run meanwhile."""
        torch.cuda.empty_cache()
        reserved, allocated = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
        with without_random_streams():
            yield
        reserved, allocated = torch.cuda.memory_reserved() - reserved, torch.cuda.memory_allocated() - allocated
        self._bytes[slot] += reserved
        self._bytes_of_replays[slot] += reserved - allocated


class _Passes:
    """The captured passes of one shape of input, and the buffers between them and the rest of the model.

    Args:
        graphs: the decoder.
        call: arguments of the pass that is captured.
        capture: captures the kernels of a function and returns what launches them.
    """

    def __init__(self, graphs: _DecoderGraphs, call: Call, capture: Capture) -> None:
        self._graphs, self._call = graphs, call.without_tensors()
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

    def capture_backward(self, capture: Capture) -> None:
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
        with torch.enable_grad(), captured(graphs.parameters):
            self._output = graphs.run(**self._call.arguments(self._inputs))

    def _run_backward(self) -> None:
        parameters = self._graphs.parameters
        assert self._output is not None and self._of_output is not None, "a backward pass follows a forward pass"
        found = torch.autograd.grad(self._output, [*self._leaves, *parameters], self._of_output, allow_unused=True)
        self._of_leaves = list(found[:len(self._leaves)])
        add_gradients(parameters, found[len(self._leaves):])

    def replay(self, inputs: dict[str, Any], call: Call, lease: Lease, anchor: torch.Tensor) -> torch.Tensor:
        """Replay the forward pass, and the backward pass when autograd comes to it.

        `PassesOfLayers.replay` has the arguments.
        """
        result: torch.Tensor = _Replay.apply(self, lease, anchor, *call.tensors.values())
        return result

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
        self._graphs.register_gradients(self._graphs.parameters)
        return [next(found) if buffer.requires_grad else None for buffer in self._buffers]


class _Replay(torch.autograd.Function):
    """Both passes of a decoder as one node."""

    @staticmethod
    def forward(ctx: Any, passes: _Passes, lease: Lease, anchor: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        """Replay the forward pass. `anchor` has a gradient even if no other input has."""
        ctx.passes, ctx.lease = passes, lease
        return passes.forward(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Replay the backward pass."""
        found = ctx.passes.backward(gradients[0])
        ctx.lease.release()
        return None, None, None, *found
