"""The two layers that are as large as the vocabulary: the embedding and the output layer.

Both add their weight gradients to `main_grad` in the backward pass. Otherwise every microbatch would write two
gradients of a whole vocabulary in the parameters' precision, and read them again to add them. Most rows of the
embedding's are zero, because a microbatch has few different tokens.

With a vocabulary of 150,000 entries, the logits of a row need far more memory than the row's hidden states. Losses,
log-probs and entropies are one number for each token, so the logits of some tokens can be computed, reduced to these
numbers and dropped. The backward pass computes them again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    VocabParallelEmbedding,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch.autograd.function import once_differentiable

from mimo.model import compat


@dataclass(frozen=True)
class TokenFunction:
    """Numbers that are computed from each token's logits.

    Attributes:
        compute: takes vocabulary-parallel logits `[s, b, vocab / tp]`, whose scale is already applied, and the inputs
            as `[s, b]`. Returns one or more tensors `[s, b]`. A token's result depends on that token only. Collectives
            over the tensor-parallel group are allowed in the forward pass only.
        inputs: tensors `[b, s]`, such as labels. If context-parallel ranks share rows, `s` counts this rank's tokens.
    """

    compute: Callable[..., tuple[torch.Tensor, ...]]
    inputs: tuple[torch.Tensor, ...] = ()

    def of(self, logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Apply the function to the logits of all tokens, `[s, b, vocab / tp]`. Returns tensors `[b, s]`."""
        found = self.compute(logits, *(values.t() for values in self.inputs))
        return tuple(values.t().contiguous() for values in found)


class Embedding(VocabParallelEmbedding):
    """Megatron Core's embedding, which adds its weight gradient to `main_grad`, if the weight has one."""

    @classmethod
    def widen(cls, layer: VocabParallelEmbedding) -> None:
        """Turn an existing layer into one of this class, because Megatron Core's models construct their own."""
        assert type(layer) is VocabParallelEmbedding, type(layer)
        layer.__class__ = cls

    def forward(self, input_: torch.Tensor) -> Any:
        """Return the entries of tokens, as Megatron Core's method does.

        Args:
            input_: tokens `[b, s]`.
        """
        if not hasattr(self.weight, "main_grad") or self.reduce_scatter_embeddings:
            return super().forward(input_)
        outside = None
        if self.tp_group.size() > 1:
            outside = (input_ < self.vocab_start_index) | (input_ >= self.vocab_end_index)
            input_ = (input_ - self.vocab_start_index).masked_fill(outside, 0)
        entries = _Lookup.apply(input_, self.weight)
        if outside is not None:
            entries = entries.masked_fill(outside.unsqueeze(-1), 0.0)
        return reduce_from_tensor_model_parallel_region(entries, group=self.tp_group)


class _Lookup(torch.autograd.Function):
    """Look up the entries of tokens, and add their gradients to the `main_grad` of the weight."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tokens, weight)
        return F.embedding(tokens, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, torch.Tensor]:
        tokens, weight = ctx.saved_tensors
        ordered, order = tokens.flatten().sort(stable=True)
        # Entries are numbered in order, without asking the device how many there are, and the gradients of each are
        # summed first. Adding them to `main_grad` one by one would be slow for tokens that stand for images, because
        # thousands of them have the same entry, and the order of the sum would differ from one run to the next.
        numbers = torch.cat((ordered.new_zeros(1), (ordered[1:] != ordered[:-1]).cumsum(0)))
        gradient = grads[0].flatten(0, -2)[order].to(weight.main_grad.dtype)
        sums = torch.ops.aten.embedding_dense_backward(gradient, numbers, len(numbers), -1, False)
        # Rows of `sums` beyond the last number are zeros, which any entry can have.
        entries = torch.arange(len(numbers), device=tokens.device) % len(weight)
        weight.main_grad.index_add_(0, entries.index_copy(0, numbers, ordered), sums)
        return None, _added(weight)


def _added(weight: Any) -> torch.Tensor:
    """Note that a weight's gradient is in `main_grad`, and return one that hooks of the reduction wait for.

    They do not read it, unless Megatron Core asks for zeros, because several layers may share the weight.
    """
    weight.grad_added_to_main_grad = True
    return torch.zeros_like(weight) if getattr(weight, "zero_out_wgrad", False) else torch.empty_like(weight)


class OutputLayer(ColumnParallelLinear):
    """Megatron Core's output layer, which can also apply a `TokenFunction` to the logits of a few tokens at a time."""

    @classmethod
    def widen(cls, layer: ColumnParallelLinear) -> None:
        """Turn an existing layer into one of this class, because Megatron Core's models construct their own."""
        assert type(layer) is ColumnParallelLinear, type(layer)
        layer.__class__ = cls

    def forward(self, input_: torch.Tensor, weight: torch.Tensor | None = None,
                runtime_gather_output: bool | None = None, *, function: TokenFunction | None = None,
                chunk: int | None = None) -> Any:
        """Return logits and no bias, as Megatron Core's method does, or the result of `function`.

        Args:
            input_: hidden states `[s, b, h]`; with sequence parallelism this rank's part of `s`.
            weight: the weight to use instead of the layer's own, for tied embeddings.
            runtime_gather_output: the argument of Megatron Core's method.
            function: a function of unscaled logits. The result is then a tuple of tensors `[b, s]`.
            chunk: most tokens whose logits are in memory at a time, at least one of each row; None: all.
        """
        used = self.weight if weight is None else weight
        self.gradient_accumulation_fusion = hasattr(used, "main_grad")
        if function is None:
            return super().forward(input_, weight, runtime_gather_output)
        if chunk is None:
            return function.of(super().forward(input_, weight, runtime_gather_output)[0])
        assert self.bias is None, "output layers have no bias"
        inputs = [values.t() for values in function.inputs]
        found = _Chunked.apply(input_, used, self, max(chunk // input_.shape[1], 1), function.compute, *inputs)
        return tuple(values.t().contiguous() for values in found)


class _Chunked(torch.autograd.Function):
    """Apply `compute` to the logits of all tokens, `chunk` tokens of each row at a time."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, layer: OutputLayer, chunk: int,
                compute: Callable[..., tuple[torch.Tensor, ...]], *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(hidden, weight, *inputs)
        ctx.layer, ctx.chunk, ctx.compute = layer, chunk, compute
        # Read here, as Megatron Core's linear layers do, because multi-token prediction may call the layer several
        # times before the backward pass.
        ctx.main_grad = vars(weight).get("main_grad")
        # So that a result without a gradient, such as an entropy that is only reported, costs no backward pass.
        ctx.set_materialize_grads(False)
        whole, parts = _whole(hidden, layer), []
        for rows in _chunks(len(whole), chunk):
            parts.append(compute(torch.matmul(whole[rows], weight.t()), *(values[rows] for values in inputs)))
        found = tuple(torch.cat(values) for values in zip(*parts, strict=True))
        ctx.mark_non_differentiable(*(values for values in found if not values.is_floating_point()))
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, *inputs = ctx.saved_tensors
        layer: OutputLayer = ctx.layer
        whole = _whole(hidden, layer)
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        of_hidden = torch.zeros_like(whole) if needs_hidden else None
        # Summed in float32. Otherwise each chunk's part would be rounded to bfloat16 once more than without chunks.
        of_weight = None
        if needs_weight and ctx.main_grad is None:
            of_weight = torch.zeros(weight.shape, dtype=torch.promote_types(weight.dtype, torch.float32),
                                    device=weight.device)
        kept = [index for index, grad in enumerate(grads) if grad is not None]
        for rows in _chunks(len(whole), ctx.chunk) if kept else ():
            of_logits = _gradient_of_logits(torch.matmul(whole[rows], weight.t()), ctx.compute,
                                            [values[rows] for values in inputs],
                                            {index: grads[index][rows] for index in kept})  # type: ignore[index]
            if of_hidden is not None:
                of_hidden[rows] = torch.matmul(of_logits, weight)
            flat = of_logits.flatten(0, 1), whole[rows].flatten(0, 1)
            if of_weight is not None:
                of_weight += flat[0].t().matmul(flat[1])
            elif needs_weight:
                compat.accumulate_weight_gradient(flat[1], flat[0], ctx.main_grad)
        if of_weight is not None:
            of_weight = of_weight.to(weight.dtype)
        elif needs_weight:
            of_weight = _added(weight)
        if of_hidden is not None and layer.tp_group.size() > 1:
            reduce = (reduce_scatter_to_sequence_parallel_region if layer.sequence_parallel
                      else reduce_from_tensor_model_parallel_region)
            of_hidden = reduce(of_hidden, group=layer.tp_group)
        return (of_hidden, of_weight, None, None, None, *(None for _ in inputs))


def _whole(hidden: torch.Tensor, layer: OutputLayer) -> torch.Tensor:
    """Gather the hidden states that sequence parallelism has split."""
    if not layer.sequence_parallel:
        return hidden
    gathered: torch.Tensor = gather_from_sequence_parallel_region(hidden, group=layer.tp_group)
    return gathered


def _chunks(length: int, chunk: int) -> Iterator[slice]:
    for start in range(0, length, chunk):
        yield slice(start, min(start + chunk, length))


def _gradient_of_logits(logits: torch.Tensor, compute: Callable[..., tuple[torch.Tensor, ...]],
                        inputs: list[torch.Tensor], grads: dict[int, torch.Tensor]) -> torch.Tensor:
    """Return the gradient of a chunk's logits; `grads` has the gradients of some of the results by their index."""
    with torch.enable_grad():
        # A clone would double the memory. The leaf is not read again, so losses may overwrite it.
        leaf = logits.detach().requires_grad_()
        found = compute(leaf.view_as(leaf), *inputs)
        (gradient,) = torch.autograd.grad([found[index] for index in grads], leaf, list(grads.values()))
    return gradient
