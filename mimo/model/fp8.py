"""Matrix products of layers in FP8: which layers use it, which sizes fit, and an emulation in plain PyTorch.

The products of a layer's linear parts with their weights are quantised: attention, MLPs, shared and routed experts, and
Mamba's projections, and with --fp8-output-proj the output layer. Embeddings, norms, routers, the attention core,
Mamba's scan and projectors keep the model's precision, and so do the weights that are saved and exported.

With Transformer Engine's layers, Megatron Core enters the recipe around each layer. Weights are quantised once for each
optimizer step, which calls `forget_weights`. Passes without gradients, which include the first pass of recomputed
layers, quantise again, because weights may be exchanged around them. Separate products of experts quantise again, too.
With --fp8-primary-weights, all passes use the copies of `PrimaryWeights` for weights that train.

Layers in plain PyTorch round both operands of each product to FP8 and back. That is slower than computing without FP8,
but it shows on any machine what FP8 does to a run.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from megatron.core.fp8_utils import get_fp8_context
from megatron.core.ssm.mamba_layer import MambaLayer
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from megatron.core.transformer.transformer_layer import TransformerLayer

from mimo.config.validate_fp8 import check_logits, check_widths
from mimo.model import compat
from mimo.model.compat import LASTING, WEIGHT
from mimo.model.moe import DuplicatedLinear
from mimo.model.packed_experts import PackedLinear
from mimo.model.vocabulary import OutputLayer
from mimo.protocols import Fp8

logger = logging.getLogger(__name__)

BLOCK = 128
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


# Layers of Transformer Engine that may hold FP8 copies of their weights, and those whose copies stand for the weights.
_HOLDERS: weakref.WeakSet[Any] = weakref.WeakSet()
_PRIMARY: weakref.WeakSet[Any] = weakref.WeakSet()


def forget_weights() -> None:
    """Use no FP8 copy of a weight any more, because the weights have changed; free those that need not last.

    Copies of `PrimaryWeights` stay until it makes new ones.
    """
    for linear in _HOLDERS - _PRIMARY:
        copies = compat.fp8_copies(linear)
        lasting = copies.get(LASTING)
        copies.clear()
        if lasting is not None:
            copies[LASTING] = lasting


class LastingCopies:
    """FP8 copies of weights that stay where they are in memory, as CUDA graphs need them.

    Args:
        modules: parts of a model. Linear layers of Transformer Engine have copies once they have run with gradients;
            other modules have none.
    """

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        self._linears = [part for part in modules if part in _HOLDERS and WEIGHT in compat.fp8_copies(part)]
        for linear in self._linears:
            copies = compat.fp8_copies(linear)
            copies[LASTING] = copies[WEIGHT]

    def renew(self) -> None:
        """Bring all copies up to date with weights that have changed."""
        for linear in self._linears:
            _renew(linear)


def _renew(linear: Any) -> None:
    """Bring the lasting copy of a layer's weight up to date, if it has one."""
    def quantise_into(copy: Any) -> None:
        if isinstance(linear.forward, PackedLinear):
            linear.forward.quantize_into(copy)
        else:
            copy.quantize_(linear.weight)

    compat.renew_lasting_copy(linear, quantise_into)


class PrimaryWeights:
    """FP8 copies that stand for the weights of a module's linear layers: its passes read nothing else.

    Args:
        module: a built module that trains, after `use_fp8` and `mimo.model.packed_experts.choose_grouped_gemm`.
        impl: `local` or `transformer_engine`.
        fp8: format and recipe.

    Attributes:
        parameters: the weights. They need their values only in `renew`, which has to come before the first pass.

    Raises:
        ValueError: experts have separate products, which quantise their weights in every pass.
    """

    def __init__(self, module: torch.nn.Module, impl: str, fp8: Fp8) -> None:
        self._fp8, self._is_emulated = fp8, impl == "local"
        self._linears: list[Any] = []
        self.parameters: list[torch.nn.Parameter] = []
        for name, linear in _linears(module, impl):
            weights = [weight for key, weight in linear.named_parameters(recurse=False)
                       if key.startswith("weight") and weight.requires_grad]
            if not weights:
                continue  # it is frozen
            packed = isinstance(linear.forward, PackedLinear)
            if not packed and not hasattr(linear, "weight"):
                raise ValueError(f"--fp8-primary-weights needs --moe-gemm packed, and {name} multiplies by its experts "
                                 "one after the other, which quantises their weights in every pass")
            if packed:
                linear.forward.keeps_copy = True
            self._linears.append(linear)
            self.parameters += weights
        if not self._is_emulated:
            _PRIMARY.update(self._linears)

    @torch.no_grad()
    def renew(self) -> None:
        """Make the copies from the weights, after the first time in the same memory."""
        for linear in self._linears:
            if self._is_emulated:
                linear.weight.fp8_copy = quantised(linear.weight, E4M3, self._fp8.recipe, is_weight=True)
                continue
            copies = compat.fp8_copies(linear)
            copies.pop(WEIGHT, None)
            if LASTING not in copies:
                packed = isinstance(linear.forward, PackedLinear)
                copies[LASTING] = linear.forward.new_copy() if packed else compat.new_fp8_copy(linear)
                copies[WEIGHT] = copies[LASTING]
            _renew(linear)


def use_fp8(module: torch.nn.Module, fp8: Fp8, impl: str) -> None:
    """Have the layers of a built module multiply in FP8.

    Args:
        module: the language model or an encoder.
        fp8: format and recipe, and the flag that gave them.
        impl: `local` or `transformer_engine`.

    Raises:
        ValueError: the GPU has no such products, a weight's sizes do not fit, or the provider ignores the recipe.
    """
    linears = list(_linears(module, impl))
    check_widths(((f"{name}.{key}", weight.shape) for name, linear in linears
                  for key, weight in linear.named_parameters(recurse=False) if weight.dim() == 2), fp8)
    if impl == "transformer_engine":
        from transformer_engine.pytorch.fp8 import FP8GlobalStateManager

        available, reason = (FP8GlobalStateManager.is_fp8_block_scaling_available() if fp8.recipe == "blockwise"
                             else FP8GlobalStateManager.is_fp8_available())
        if not available:
            raise ValueError(f"{fp8} cannot run here: {reason}")
        if any(weight.dtype != torch.bfloat16 for _, linear in linears for weight in linear.parameters()):
            raise ValueError(f"{fp8} with --no-bf16: the kernels take bfloat16 weights; give --bf16")
        if not linears or any(layer.config.fp8 != fp8.format for layer in _layers(module)):
            raise ValueError(f"{fp8}: the model provider builds layers without FP8; leave the flag out, or have it "
                             "read BuildContext.fp8")
        for _, linear in linears:
            _HOLDERS.add(linear)
            if "weight" in dict(linear.named_parameters()):  # routed experts pad their own rows
                linear.forward = partial(_with_whole_rows, linear, fp8, linear.forward)
    else:
        for _, linear in linears:
            compat.replace_product(linear, partial(_emulated_product, fp8))
    if fp8.output_proj:
        _use_fp8_for_logits(module, fp8, impl)
    logger.info("%s: %d linear layers%s multiply in FP8%s", fp8, len(linears),
                " and the output layer" if fp8.output_proj else "",
                "" if impl == "transformer_engine" else ", emulated by rounding the operands (slow)")


def _use_fp8_for_logits(module: torch.nn.Module, fp8: Fp8, impl: str) -> None:
    """Have the output layer of the last pipeline stage multiply in FP8; other stages have none."""
    layers = [part for part in module.modules() if isinstance(part, OutputLayer)]
    if not layers and any(getattr(part, "post_process", False) for part in module.modules()):
        raise ValueError(f"--fp8-output-proj: {type(module).__name__} has no output layer of mimo.model.vocabulary; "
                         "leave the flag out")
    for layer in layers:
        check_logits((layer.output_size_per_partition, layer.input_size), fp8)
        compat.replace_product(layer, partial(_emulated_logits, fp8) if impl == "local" else
                               partial(_logits, _borrowing_linear(layer), fp8))


def _borrowing_linear(layer: OutputLayer) -> Any:
    """Return a linear layer of Transformer Engine that is not part of the model and takes its weight for each call.

    The output layer's own class stays, because tied embeddings give it a weight, and checkpoints and weight maps know
    it.
    """
    from transformer_engine.pytorch import Linear

    linear = Linear(layer.input_size, layer.output_size, bias=False, sequence_parallel=layer.sequence_parallel,
                    tp_group=layer.tp_group, parallel_mode="column", params_dtype=torch.bfloat16, device="meta")
    linear.config = layer.config
    _HOLDERS.add(linear)
    return linear


def _logits(linear: Any, fp8: Fp8, _: Callable[..., torch.Tensor], input: torch.Tensor,  # noqa: A002
            weight: torch.Tensor, *, gradient_accumulation_fusion: bool, **options: Any) -> torch.Tensor:
    """Multiply hidden states `[s, b, h]` by the weight of an output layer with Transformer Engine.

    `options` say how tensor-parallel ranks exchange tokens and gradients, which `linear` knows.
    """
    def multiply(rows: torch.Tensor) -> tuple[torch.Tensor, None]:
        # Without gradients, None makes Transformer Engine quantise the weight again.
        with get_fp8_context(linear.config):
            return linear(rows, is_first_microbatch=False if torch.is_grad_enabled() else None), None

    linear.weight = weight
    linear.fuse_wgrad_accumulation = gradient_accumulation_fusion
    logits: torch.Tensor = _with_whole_rows(linear, fp8, multiply, input)[0]
    return logits


def _layers(module: torch.nn.Module) -> Iterator[Any]:
    for part in module.modules():
        if isinstance(part, TransformerLayer | MambaLayer | MultiTokenPredictionLayer):
            yield part


def _linears(module: torch.nn.Module, impl: str) -> Iterator[tuple[str, Any]]:
    """Yield the quantised linear parts of a module's layers and their names, each once."""
    kinds: tuple[type, ...] = (ColumnParallelLinear, RowParallelLinear, DuplicatedLinear)
    if impl == "transformer_engine":
        from transformer_engine.pytorch import GroupedLinear, LayerNormLinear, Linear

        kinds = (Linear, LayerNormLinear, GroupedLinear)
    inside = {id(part) for layer in _layers(module) for part in layer.modules()}
    for name, part in module.named_modules():
        if id(part) in inside and isinstance(part, kinds):
            yield name, part


def _with_whole_rows(linear: Any, fp8: Fp8, forward: Callable[..., Any], hidden: torch.Tensor, *args: Any,
                     **kwargs: Any) -> Any:
    """Call a linear layer of Transformer Engine with as many rows of zeros added as the FP8 product needs.

    Packed rows and images have any number of tokens. Rows of zeros change neither the other rows nor, because their
    gradient is zero as well, any weight gradient.
    """
    # Transformer Engine would overwrite the gradient buffer in a first microbatch. In any other one, it quantises the
    # weights if it has kept no copy.
    linear.disable_parameter_transpose_cache = not torch.is_grad_enabled() and linear not in _PRIMARY
    if torch.is_grad_enabled():
        _renew(linear)
    linear.is_first_microbatch = False
    shape, multiple = hidden.shape[:-1], fp8.multiple
    missing = -shape.numel() % multiple
    if not missing:
        return forward(hidden, *args, **kwargs)
    if linear.sequence_parallel:
        raise ValueError(f"{fp8} with --sequence-parallel: {shape.numel()} tokens of a microbatch on a rank are not a "
                         f"multiple of {multiple}")
    output, bias = forward(torch.nn.functional.pad(hidden.flatten(0, -2), (0, 0, 0, missing)), *args, **kwargs)
    return output[:shape.numel()].unflatten(0, shape), bias


# Emulation in plain PyTorch.


def quantised(values: torch.Tensor, dtype: torch.dtype, recipe: str, *, is_weight: bool = False) -> tuple[
        torch.Tensor, torch.Tensor]:
    """Round to FP8, with one scale for the tensor or for each block.

    Args:
        values: `[..., columns]`.
        dtype: FP8 dtype.
        recipe: `tensorwise`, or `blockwise` for blocks of 1 x 128, in weights 128 x 128, with powers of two as scales.
        is_weight: whether this is a weight `[rows, columns]`.

    Returns:
        The FP8 numbers, and float32 scales by which they are multiplied. With `blockwise` these are
        `[rows / size, size, columns / 128, 128]` and `[rows / size, 1, columns / 128, 1]`.
    """
    blocks = values.float()
    if recipe == "blockwise":
        rows = BLOCK if is_weight else 1
        blocks = blocks.reshape(-1, rows, values.shape[-1] // BLOCK, BLOCK)
        largest = blocks.abs().amax(dim=(1, 3), keepdim=True)
    else:
        largest = blocks.abs().max() if values.numel() else blocks.new_zeros(())
    # A scale below the least normal number would make the quotient overflow.
    scale = (largest / torch.finfo(dtype).max).clamp(min=torch.finfo(torch.float32).tiny)
    scale = torch.where(largest > 0, scale, 1.0)
    if recipe == "blockwise":
        scale = torch.exp2(scale.log2().ceil())
    return (blocks / scale).to(dtype), scale


def rounded(values: torch.Tensor, dtype: torch.dtype, recipe: str, *, is_weight: bool = False) -> torch.Tensor:
    """Round to FP8 and back; see `quantised`."""
    return _restored(*quantised(values, dtype, recipe, is_weight=is_weight), values)


def _restored(numbers: torch.Tensor, scale: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return (numbers.float() * scale).reshape(like.shape).to(like.dtype)


class _Round(torch.autograd.Function):
    """Round an operand, and pass its gradient through."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, recipe: str, is_weight: bool) -> torch.Tensor:
        return rounded(values, E4M3, recipe, is_weight=is_weight)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grads[0], None, None


class _Restore(torch.autograd.Function):
    """Take a weight's values from its FP8 copy, and pass its gradient through."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, numbers: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return _restored(numbers, scale, weight)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grads[0], None, None


class _RoundGradient(torch.autograd.Function):
    """Pass values through, and round their gradient, which is an operand of both products of the backward pass."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, dtype: torch.dtype, recipe: str) -> torch.Tensor:
        ctx.options = dtype, recipe
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return rounded(grads[0], *ctx.options), None, None


def _emulated_product(fp8: Fp8, product: Callable[..., torch.Tensor], input: torch.Tensor,  # noqa: A002
                      weight: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Multiply `input` by `weight` with `product`, with the operands of all three products of a step rounded to FP8."""
    copy = getattr(weight, "fp8_copy", None)
    matrix = _Round.apply(weight, fp8.recipe, True) if copy is None else _Restore.apply(weight, *copy)
    output = product(_Round.apply(input, fp8.recipe, False), matrix, *args, **kwargs)
    rounded_output: torch.Tensor = _RoundGradient.apply(output, E5M2 if fp8.format == "hybrid" else E4M3, fp8.recipe)
    return rounded_output


def _emulated_logits(fp8: Fp8, product: Callable[..., torch.Tensor], **kwargs: Any) -> torch.Tensor:
    """Do the same for an output layer, whose rounded weight has no `main_grad`, and whose logits losses overwrite."""
    return _emulated_product(fp8, product, **{**kwargs, "gradient_accumulation_fusion": False}).clone()
