"""CUDA graphs of parts of layers, for decoders whose experts get tokens from other ranks.

The host of such a rank waits in every layer for the numbers of tokens that ranks exchange, so no graph can contain a
whole pass. But everything before that has fixed sizes: attention, the norm before the experts, the shared experts and
the router. Each layer with experts has two graphs of that part, and the exchange and the routed experts run as usual.
Layers without experts, such as Mamba-2, are captured as a whole.

The graphs of all layers for one microbatch in flight share their memory. This works because they are captured in the
order in which they are replayed: first the forward passes of all layers, then the backward passes from the last layer
to the first. A tensor that a later graph reads is alive while all graphs up to that one are captured, so none of them
gets its memory. Memory of tensors that nobody reads any more is used again, as it is without graphs. Autograd comes to
the backward passes only later, so they are captured in advance, at the end of the decoder's forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.models.hybrid.hybrid_block import HybridStack
from megatron.core.ssm.mamba_layer import MambaLayer
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_block import TransformerBlock

from mimo.model import compat
from mimo.model.graph_parts import HIDDEN, PACKED, Call, Capture, Lease, add_gradients, borrowed, captured

# How to capture on a GPU: the function that captures, and what surrounds each capture and all those of a shape.
Recorder = tuple[Capture, Callable[[], AbstractContextManager[None]], Callable[[], AbstractContextManager[None]]]


def unsplittable_reason(decoder: Any) -> str:
    """Return why the layers of a decoder cannot have graphs of parts of them; empty if they can.

    Args:
        decoder: a decoder whose experts get tokens from other ranks.
    """
    if not isinstance(decoder, TransformerBlock | HybridStack) or not all(
            isinstance(layer, MambaLayer) or compat.has_parts(layer) for layer in decoder.layers):
        return "with experts on several ranks, only Megatron Core's own layers have graphs"
    if decoder.config.recompute_granularity == "full":
        return "with experts on several ranks, layers that are recomputed as a whole have no graphs"
    if decoder.config.fp32_residual_connection:
        return "with experts on several ranks, graphs end in a residual stream of the layers' own precision"
    return ""


class SplitLayers:
    """The layers of a decoder, each of which can replay the part before its experts.

    Args:
        decoder: the decoder, for which `unsplittable_reason` is empty.

    Attributes:
        current: the passes that the decoder replays now; None if layers run without graphs.
    """

    def __init__(self, decoder: Any) -> None:
        self.current: PassesOfLayers | None = None
        self._layers = [_WholeLayer(layer, self) if isinstance(layer, MambaLayer) else _SplitLayer(layer, self)
                        for layer in decoder.layers]

    def captured_modules(self) -> Iterator[torch.nn.Module]:
        """Yield all modules, also parts of others, that run inside of graphs."""
        for layer in self._layers:
            yield from layer.captured_modules()


class _SplitLayer:
    """A layer, with what it runs inside and outside of graphs.

    Attributes:
        parameters: trainable parameters of the captured part.
    """

    def __init__(self, layer: Any, layers: SplitLayers) -> None:
        self.layer, self._layers = layer, layers
        self._attention, self._mlp, self._after_mlp = compat.parts_of_layer(layer)
        self.experts: MoELayer | None = layer.mlp if isinstance(layer.mlp, MoELayer) else None
        outside = {id(parameter) for part in self._outside() for parameter in part.parameters()}
        self.parameters = [parameter for parameter in layer.parameters()
                           if parameter.requires_grad and id(parameter) not in outside]
        # What the part before the experts has left for the rest of the layer.
        self._found: tuple[torch.Tensor, ...] = ()
        compat.replace_parts_of_layer(layer, self._replay_attention, self._run_mlp)

    def _outside(self) -> list[torch.nn.Module]:
        """Return the parts that run on tokens of other ranks, or on their way there and back."""
        if self.experts is None:
            return []
        latent = [getattr(self.experts, name, None) for name in ("fc1_latent_proj", "fc2_latent_proj")]
        return [part for part in (self.experts.experts, *latent) if part is not None]

    def captured_modules(self) -> Iterator[torch.nn.Module]:
        """Yield all modules of the captured part."""
        outside = {id(each) for part in self._outside() for each in part.modules()}
        yield from (each for each in self.layer.modules() if id(each) not in outside)

    def _replay_attention(self, hidden_states: torch.Tensor, **others: Any) -> tuple[torch.Tensor, Any]:
        passes = self._layers.current
        if passes is None:
            result: tuple[torch.Tensor, Any] = self._attention(hidden_states, **others)
            return result
        self._found = passes.replay_layer(self, hidden_states, others)
        return self._found[0], None

    def before_experts(self, hidden: torch.Tensor, padding_mask: torch.Tensor | None = None,
                       **others: Any) -> tuple[torch.Tensor, ...]:
        """Run what is captured.

        Args:
            hidden: input of the layer, `[s, b, hidden]`.
            padding_mask: bool `[b, s]`, True for padding.
            others: further arguments of the layer.

        Returns:
            Without experts, the output of the layer. With experts, the hidden states to which their output is added,
            their input, the weights of the experts for each token and a bool map of those that it is sent to, both
            `[s * b, experts]`, and if there are shared experts, their output.
        """
        hidden, _ = self._attention(hidden, padding_mask=padding_mask, **others)
        layer, experts = self.layer, self.experts
        if experts is None:
            return (self._mlp(hidden, padding_mask=padding_mask, packed_seq_params=others.get("packed_seq_params")),)
        normed = layer.pre_mlp_layernorm(hidden)
        assert isinstance(normed, torch.Tensor), "no layer fuses the residual connection into its norm"
        shared = experts.shared_experts_compute(normed)
        mask = None if padding_mask is None else padding_mask.transpose(0, 1).bool()
        probs, routing_map = experts.route(normed, mask)
        return (hidden, normed, probs, routing_map, *(() if shared is None else (shared,)))

    def _run_mlp(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self._layers.current is None:
            result: torch.Tensor = self._mlp(hidden, *args, **kwargs)
            return result
        found, self._found = self._found, ()
        if self.experts is None:
            return found[0]
        hidden, normed, probs, routing_map, *shared = found
        if self.experts.moe_layer_recompute and self.experts.training:
            output = tensor_parallel.checkpoint(self._run_experts, False, normed, probs, routing_map)
        else:
            output = self._run_experts(normed, probs, routing_map)
        output = self.experts.postprocess(output, shared[0] if shared else None)
        result = self._after_mlp((output, None), hidden)
        return result

    def _run_experts(self, normed: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor) -> torch.Tensor:
        experts = self.experts
        assert experts is not None
        rows, probs = experts.preprocess(normed, probs, routing_map)
        rows, probs = experts.dispatch(rows, probs)
        output, _ = experts.routed_experts_compute(rows, probs)
        combined: torch.Tensor = experts.combine(output)
        return combined


class _WholeLayer:
    """A layer of a hybrid that is captured as a whole.

    Attributes:
        parameters: its trainable parameters.
    """

    def __init__(self, layer: Any, layers: SplitLayers) -> None:
        self._layer, self._layers = layer, layers
        self._run = layer.forward
        self.parameters = [parameter for parameter in layer.parameters() if parameter.requires_grad]
        layer.forward = self._replay

    def captured_modules(self) -> Iterator[torch.nn.Module]:
        """Yield the layer and all its parts."""
        yield from self._layer.modules()

    def _replay(self, hidden_states: torch.Tensor, **others: Any) -> torch.Tensor:
        passes = self._layers.current
        output: torch.Tensor = (self._run(hidden_states, **others) if passes is None else
                                passes.replay_layer(self, hidden_states, others)[0])
        return output

    def before_experts(self, hidden: torch.Tensor, **others: Any) -> tuple[torch.Tensor, ...]:
        """Run the layer on `[s, b, hidden]`."""
        return (self._run(hidden, **others),)


class PassesOfLayers:
    """The passes of all layers for one shape of input and one microbatch in flight.

    Args:
        layers: the layers.
        run: runs the decoder.
        call: arguments of the decoder, of this shape.
        register: is told the parameters whose gradients a backward pass has added.
        recorder: how to capture; None for calling the layers again with the same buffers.
    """

    def __init__(self, layers: SplitLayers, run: Callable[..., torch.Tensor], call: Call,
                 register: Callable[[Sequence[Any]], None], recorder: Recorder | None) -> None:
        self._layers, self._run, self._register, self._recorder = layers, run, register, recorder
        self._call = call.without_tensors()
        # Arguments that all layers get. They are copied once for all of them.
        self._shared = {name: torch.empty_like(value) for name, value in call.tensors.items() if name != HIDDEN}
        self._passes: dict[_SplitLayer | _WholeLayer, _LayerPasses] = {}
        # Set during a forward pass. The first layer takes the lease, because its backward pass is the last.
        self._lease: Lease | None = None
        self._anchor: torch.Tensor | None = None

    def replay(self, inputs: dict[str, Any], call: Call, lease: Lease, anchor: torch.Tensor) -> torch.Tensor:
        """Run a decoder whose layers replay their forward passes now, and their backward passes with autograd.

        Args:
            inputs: arguments of the decoder.
            call: the same as tensors.
            lease: is released after the backward pass.
            anchor: a tensor that requires a gradient.
        """
        for name, buffer in self._shared.items():
            buffer.copy_(call.tensors[name])
        self._lease, self._anchor = lease, anchor
        with ExitStack() as stack:
            is_new = not self._passes
            if is_new and self._recorder is not None:
                stack.enter_context(self._recorder[2]())
            self._layers.current = self
            try:
                output = self._run(**inputs)
            finally:
                self._layers.current = self._lease = self._anchor = None
            if is_new and self._recorder is not None:
                for passes in reversed(self._passes.values()):
                    with self._recorder[1]():
                        passes.capture_backward(self._recorder[0])
        return output

    def replay_layer(self, layer: _SplitLayer | _WholeLayer, hidden: torch.Tensor, others: dict[str, Any]) -> tuple[
            torch.Tensor, ...]:
        """Replay a layer's part before its experts.

        Args:
            layer: the layer.
            hidden: its input, `[s, b, hidden]`.
            others: its other arguments: those of the decoder, and None for what the decoder does not have.

        Returns:
            What its `before_experts` returns.
        """
        passes = self._passes.get(layer)
        if passes is None:
            assert all(value is None or name in (*self._shared, PACKED) for name, value in others.items()), list(others)
            passes = _LayerPasses(partial(_run_layer, layer, self._call, self._shared, tuple(others)), layer.parameters,
                                  hidden, self._register)
            if self._recorder is not None:
                with self._recorder[1]():
                    passes.capture_forward(self._recorder[0])
            self._passes[layer] = passes
        lease, self._lease = self._lease, None
        result: tuple[torch.Tensor, ...] = _ReplayLayer.apply(passes, lease, self._anchor, hidden)
        return result


# Not a method of `PassesOfLayers`: passes that refer to each other in a circle would outlive the drop of all graphs.
def _run_layer(layer: _SplitLayer | _WholeLayer, call: Call, shared: dict[str, torch.Tensor], others: tuple[str, ...],
               hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Run the part of a layer before its experts, with the named arguments of the decoder from their buffers."""
    arguments = call.arguments(shared)
    return layer.before_experts(hidden, **{name: arguments.get(name) for name in others})


class _LayerPasses:
    """Both passes of a layer's part before its experts, and the buffers between them and the rest of the layer.

    On a GPU, all buffers lie in the memory that the graphs share. So nothing of a shape stays when another one runs,
    and gradients and temporary tensors need room for one layer only.

    Args:
        run: runs the part.
        parameters: its trainable parameters.
        hidden: a tensor like its input.
        register: is told the parameters after each backward pass.
    """

    def __init__(self, run: Callable[[torch.Tensor], tuple[torch.Tensor, ...]], parameters: Sequence[Any],
                 hidden: torch.Tensor, register: Callable[[Sequence[Any]], None]) -> None:
        self._run, self._parameters, self._register = run, parameters, register
        self._shape, self._dtype, self._device = hidden.shape, hidden.dtype, hidden.device
        self._has_gradient = hidden.requires_grad
        # The input as autograd has recorded it, and as others fill it.
        self._hidden: torch.Tensor | None = None
        self._input: torch.Tensor | None = None
        # Outputs as autograd has recorded them, and as the rest of the layer gets them.
        self._recorded: tuple[torch.Tensor, ...] = ()
        self._outputs: list[torch.Tensor] = []
        # Which outputs have a gradient, and its buffers.
        self._with_gradient: list[int] = []
        self._of_outputs: list[torch.Tensor] = []
        self._of_hidden: torch.Tensor | None = None
        self._launch_forward: Callable[[], None] = self._run_forward
        self._launch_backward: Callable[[], None] = self._run_backward

    def capture_forward(self, capture: Capture) -> None:
        """Capture the forward pass. Its tensors stay until the backward pass is captured."""
        self._launch_forward = capture(self._run_forward)
        assert self._hidden is not None
        # Autograd would refuse to capture a backward pass if it saw that the input is filled before.
        self._input = borrowed(self._hidden)
        self._outputs = [borrowed(each) for each in self._recorded]

    def capture_backward(self, capture: Capture) -> None:
        """Capture the backward pass, drop the autograd graph that led to it, and give all memory back."""
        for parameter in self._parameters:
            parameter.grad_added_to_main_grad = False
        self._launch_backward = capture(self._run_backward)
        self._recorded, self._hidden = (), None
        self._of_outputs = [borrowed(each) for each in self._of_outputs]
        self._of_hidden = None if self._of_hidden is None else borrowed(self._of_hidden)

    def _allocate_input(self) -> torch.Tensor:
        """Return the input's buffer, which is allocated where it is first used: when the forward pass is captured."""
        if self._hidden is None:
            self._hidden = torch.empty(self._shape, dtype=self._dtype, device=self._device,
                                       requires_grad=self._has_gradient)
        return self._hidden

    def _gradient_buffers(self) -> list[torch.Tensor]:
        """Return the buffers of the outputs' gradients, allocated when the backward pass is captured."""
        if not self._of_outputs:
            self._of_outputs = [torch.empty_like(self._recorded[index]) for index in self._with_gradient]
        return self._of_outputs

    def _run_forward(self) -> None:
        hidden = self._allocate_input()
        with torch.enable_grad(), captured(self._parameters):
            self._recorded = self._run(hidden)
        self._with_gradient = [index for index, each in enumerate(self._recorded) if each.requires_grad]
        self._outputs = [each.detach() for each in self._recorded]

    def _run_backward(self) -> None:
        outputs = [self._recorded[index] for index in self._with_gradient]
        leaves = [self._hidden] if self._has_gradient else []
        found = torch.autograd.grad(outputs, [*leaves, *self._parameters], self._gradient_buffers(), allow_unused=True)
        self._of_hidden = found[0] if leaves else None
        add_gradients(self._parameters, found[len(leaves):])

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Replay the forward pass. The outputs are valid until the backward pass."""
        with torch.no_grad():
            (self._allocate_input() if self._input is None else self._input).copy_(hidden)
        self._launch_forward()
        return tuple(each.detach() for each in self._outputs)

    def backward(self, gradients: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        """Replay the backward pass from the gradients of the outputs; return the gradient of the input."""
        for buffer, index in zip(self._gradient_buffers(), self._with_gradient, strict=True):
            gradient = gradients[index]
            if gradient is None:
                buffer.zero_()
            else:
                buffer.copy_(gradient)
        self._launch_backward()
        self._register(self._parameters)
        # A copy, because other layers write the memory before autograd may have used it.
        return None if self._of_hidden is None else self._of_hidden.clone()


class _ReplayLayer(torch.autograd.Function):
    """Both passes of a layer's part before its experts as one node."""

    @staticmethod
    def forward(ctx: Any, passes: _LayerPasses, lease: Lease | None, anchor: torch.Tensor, hidden: torch.Tensor
                ) -> tuple[torch.Tensor, ...]:
        """Replay the forward pass. `anchor` has a gradient even if `hidden` has none."""
        ctx.passes, ctx.lease = passes, lease
        ctx.set_materialize_grads(False)
        outputs = passes.forward(hidden)
        ctx.mark_non_differentiable(*(each for each in outputs if not each.is_floating_point()))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        """Replay the backward pass."""
        found = ctx.passes.backward(gradients)
        if ctx.lease is not None:
            ctx.lease.release()
        return None, None, None, found
