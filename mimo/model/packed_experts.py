"""Products with the weights of all experts of a layer in one cuBLASLt call.

Megatron Core's grouped linear layers hold one parameter for each expert. Transformer Engine multiplies by them one
after the other, or in a CUTLASS kernel that supports neither weight gradients nor every size. cuBLASLt has a product
that takes the sizes of the groups from the device, but at most 64 separate matrices.

The parameters stay as they are here, so that checkpoints, optimizers, weight maps and refits see no difference. But
data-parallel training lays them and their gradients end to end in memory, so one base address and a table of offsets
describe them all. The host needs no copy of the sizes, so a grid without expert parallelism does not wait for the
device in every layer.

In FP8, weights are quantised once for each optimizer step (and, without --fp8-primary-weights, in every pass without
gradients), in the order in which they lie in memory. Rows are quantised in every pass.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.activations import squared_relu
from megatron.core.distributed import DistributedDataParallel
from megatron.core.fp8_utils import get_fp8_context
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher, MoEAlltoAllTokenDispatcher

from mimo.model import compat
from mimo.model.compat import WEIGHT
from mimo.model.expert_rows import gather_in_less_time, stay_on_device
from mimo.protocols import Fp8

logger = logging.getLogger(__name__)

# cuBLASLt reads 16 bytes at a time, so matrices have to begin at multiples of this many elements.
ALIGNMENT = 8
# Recipe of FP8, or None for bfloat16 -> the oldest cuBLASLt that has the product on Hopper.
MIN_CUBLASLT = {None: 130400, "tensorwise": 130500, "blockwise": 130600}


def unsupported_reason(dtype: torch.dtype, recipe: str | None) -> str | None:
    """Return why the current GPU and libraries lack the product for all experts; None if they have it.

    Args:
        dtype: dtype of the rows and weights.
        recipe: recipe of FP8 products; None for products in `dtype`.
    """
    import transformer_engine_torch as tex
    from transformer_engine.common.recipe import Float8BlockScaling, Float8CurrentScaling
    from transformer_engine.pytorch.module.grouped_linear import is_module_grouped_tensor_path_supported

    recipes = {None: None, "tensorwise": Float8CurrentScaling(), "blockwise": Float8BlockScaling()}
    if recipe and torch.cuda.get_device_capability() >= (10, 0):
        return "one FP8 product for all experts has been tried on Hopper GPUs only"
    if is_module_grouped_tensor_path_supported(recipes[recipe], dtype):
        return None
    version, needed = tex.get_cublasLt_version(), _version(MIN_CUBLASLT[recipe])
    if version < MIN_CUBLASLT[recipe]:
        return f"cuBLASLt {_version(version)} is older than {needed}: install nvidia-cublas {needed} or newer"
    kind = f"{recipe} FP8" if recipe else str(dtype)
    return f"Transformer Engine has no grouped product for {kind} on {torch.cuda.get_device_name()}"


def _version(number: int) -> str:
    return f"{number // 10000}.{number // 100 % 100}"


def choose_grouped_gemm(choice: str, module: torch.nn.Module, dtype: torch.dtype, *, deterministic: bool,
                        fp8: Fp8 | None, static_rows: bool) -> None:
    """Have the experts of a built module multiply with the kernels that --moe-gemm chooses.

    Args:
        choice: the flag's value.
        module: the language model with Transformer Engine's layers, in `DistributedDataParallel` if it trains.
        dtype: dtype of its parameters.
        deterministic: whether `auto` takes separate products, because only they are known to give the same bits every
            time.
        fp8: format and recipe of FP8 products, which CUTLASS kernels do not have.
        static_rows: whether the experts of a rank have room for all tokens that could come (--moe-static-rows).

    Raises:
        ValueError: `choice` is `packed`, or `static_rows` is given, and this machine or model does not support it.
    """
    num_layers = sum(isinstance(part, TEGroupedMLP) for part in module.modules())
    if not num_layers:
        return
    if choice == "auto" and deterministic:
        choice = "separate"
    # Transformer Engine reads the variable at its first product. It falls back to separate products by itself.
    os.environ["NVTE_USE_CUTLASS_GROUPED_GEMM"] = "0" if choice == "separate" or fp8 else "1"
    if choice in ("auto", "packed"):
        reason = unsupported_reason(dtype, fp8.recipe if fp8 else None)
        if reason is None:
            count = pack_experts(module, fp8, static_rows=static_rows)
            if count == num_layers or count and not static_rows:
                logger.info("experts: one cuBLASLt product for all experts in %d of %d layers", count, num_layers)
                return
            reason = "biases, an activation without a fused kernel, or matrices at odd addresses"
            if fp8:
                reason += ", --recompute-modules moe_act, --no-moe-permute-fusion or --deterministic-mode"
        if static_rows:
            raise ValueError(f"--moe-static-rows needs --moe-gemm packed, which cannot run here: {reason}; leave out "
                             "--moe-static-rows")
        if choice == "packed":
            raise ValueError(f"--moe-gemm packed cannot run here: {reason}; use auto or separate")
        logger.info("experts: %s products (%s)", "separate" if fp8 else "CUTLASS", reason)


def pack_experts(module: torch.nn.Module, fp8: Fp8 | None, *, static_rows: bool = False) -> int:
    """Have the expert layers of a module multiply by all their experts at once.

    Args:
        module: a built module with Transformer Engine's layers, in `DistributedDataParallel` if it trains. The caller
            has checked that `unsupported_reason` is None.
        fp8: format and recipe of FP8 products.
        static_rows: see `choose_grouped_gemm`.

    Returns:
        The number of layers that do so now. A layer stays as it was if it has biases, an activation without a fused
        kernel, or matrices that do not begin at multiples of 16 bytes. In FP8 its matrices also have to lie end to end,
        and a fused kernel has to sort its tokens, as with static rows.
    """
    wrapper = module if isinstance(module, DistributedDataParallel) else None
    count = 0
    for layer in module.modules():
        if not isinstance(layer, MoELayer) or not isinstance(layer.experts, TEGroupedMLP):
            continue
        experts = layer.experts
        # Products of rows with weights take any number of rows. Those for the gradients of weights do not in FP8.
        multiple = fp8.multiple if fp8 and fp8.recipe == "blockwise" else 1
        activation = _weighted_activation(experts, has_rows_of_no_expert=static_rows or multiple > 1)
        packed = [PackedLinear(linear, wrapper, fp8) for linear in (experts.linear_fc1, experts.linear_fc2)]
        if activation is None or experts.config.add_bias_linear or not all(each.can_run for each in packed):
            continue
        if (fp8 or static_rows) and not experts.config.moe_permute_fusion:
            continue
        experts.linear_fc1.forward, experts.linear_fc2.forward = packed
        dispatcher = layer.token_dispatcher
        experts.forward = partial(_forward_experts, experts, activation)
        if isinstance(dispatcher, MoEAllGatherTokenDispatcher):
            gather_in_less_time(dispatcher, multiple, static_rows=static_rows)
        elif isinstance(dispatcher, MoEAlltoAllTokenDispatcher) and dispatcher.ep_size == dispatcher.tp_size == 1:
            stay_on_device(dispatcher, multiple)
        elif multiple > 1:
            experts.forward = partial(_fill_rows, experts, activation)
            # Transformer Engine's default is 16 for every recipe, which makes its blockwise kernels crash.
            for padding in (experts.quantization_padding, experts.quantization_unpadding):
                padding.align_size = multiple
        count += 1
    return count


# Applies an activation and the router's weights `[rows]` to rows. The last argument has each expert's number of rows.
Activation = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _weighted_activation(experts: TEGroupedMLP, *, has_rows_of_no_expert: bool) -> Activation | None:
    """Return what applies the activation and the router's weights in one kernel; None for an activation without one.

    Args:
        experts: the layer's experts.
        has_rows_of_no_expert: whether there may be more rows than experts have, which are then left out.
    """
    from mimo.model.expert_activation import weighted_activation

    config = experts.config
    is_gated = config.gated_linear_unit and experts.activation_func is F.silu and config.bias_activation_fusion
    if config.moe_apply_probs_on_input or config.fp8 and experts.activation_recompute:
        return None
    if config.activation_func_clamp_value is not None or config.moe_mlp_glu_interleave_size is not None:
        return None
    if not is_gated and not (experts.activation_func is squared_relu and config.use_fused_weighted_squared_relu):
        return None
    return lambda hidden, weights, sizes: weighted_activation(
        hidden, weights, sizes.sum() if has_rows_of_no_expert else None, gated=is_gated)


def _forward_experts(experts: Any, activation: Activation, hidden: torch.Tensor, tokens_per_expert: torch.Tensor,
                     probs: torch.Tensor) -> Any:
    """Replace `TEGroupedMLP.forward`, which copies `tokens_per_expert` to a list.

    Args:
        experts: the layer's experts.
        activation: see `_weighted_activation`.
        hidden: `[rows, hidden]`, sorted by expert.
        tokens_per_expert: int64 `[experts]`, on any device.
        probs: `[rows]`, the router's weights.

    Returns:
        `[rows, hidden]`, and None in place of a bias.
    """
    sizes = tokens_per_expert.to(hidden.device, non_blocking=True)
    hidden, _ = experts.linear_fc1(hidden, sizes)
    if not experts.activation_recompute:
        return experts.linear_fc2(activation(hidden, probs, sizes), sizes)[0], None
    checkpoint = CheckpointWithoutOutput()
    output, _ = experts.linear_fc2(checkpoint.checkpoint(activation, hidden, probs, sizes), sizes)
    checkpoint.discard_output_and_register_recompute(output)
    return output, None


def _fill_rows(experts: Any, activation: Activation, hidden: torch.Tensor, tokens_per_expert: Any,
               probs: torch.Tensor) -> Any:
    """Call `_forward_experts` with zero rows added to those of each expert, for tokens from other ranks."""
    counts = tokens_per_expert.tolist()
    hidden, filled = experts.quantization_padding(hidden, counts)
    probs, _ = experts.quantization_padding(probs.unsqueeze(-1), counts)
    output, bias = _forward_experts(experts, activation, hidden, torch.tensor(filled), probs.squeeze(-1))
    return experts.quantization_unpadding(output, counts), bias


class PackedLinear:
    """Forward pass of a grouped linear layer over its packed weights.

    Args:
        linear: Transformer Engine's `GroupedLinear` with one parameter for each expert. Weights that do not share a
            storage are moved into one.
        wrapper: the `DistributedDataParallel` around it, or None for a layer that does not train.
        fp8: format and recipe of FP8 products.

    Attributes:
        parameters: each expert's weight `[out, in]`.
        trains: whether they have gradients.
        can_run: whether weights and gradients are laid out in memory as the product needs them.
        keeps_copy: whether passes without gradients use the kept FP8 copy, too, because it stands for the weights.
    """

    def __init__(self, linear: Any, wrapper: DistributedDataParallel | None, fp8: Fp8 | None = None) -> None:
        self.parameters = [getattr(linear, f"weight{index}") for index in range(linear.num_gemms)]
        self.out_features, self.in_features = self.parameters[0].shape
        self.trains = wrapper is not None and self.parameters[0].requires_grad
        if len({parameter.untyped_storage().data_ptr() for parameter in self.parameters}) > 1:
            # Move them into a new storage, end to end.
            flat = torch.cat([parameter.data.flatten() for parameter in self.parameters])
            for parameter, part in zip(self.parameters, flat.chunk(len(self.parameters)), strict=True):
                parameter.data = part.view(parameter.shape)
        self._weights = _offsets([parameter.data for parameter in self.parameters])
        self._gradients = _offsets([parameter.main_grad for parameter in self.parameters]) if self.trains else None
        self.can_run = self._weights is not None and (self._gradients is not None or not self.trains)
        self._wrapper = wrapper
        # Makes autograd call the backward pass even if the rows need no gradient. A parameter would not do, because its
        # data-parallel hook would run without a gradient.
        self._anchor = torch.empty(0, device=self.parameters[0].device, requires_grad=self.trains)
        self._linear = linear if fp8 else None
        self._fp8: _Fp8Products | None = None
        self.keeps_copy = False
        if fp8 and self._weights is not None:
            self._has_block_scales = fp8.recipe == "blockwise"
            # Quantisation reads the weights as one matrix, in the order in which they lie in memory.
            size = self.parameters[0].numel()
            self._order = self._weights[1][:-1].div(size, rounding_mode="floor")
            self.can_run &= bool((self._order * size == self._weights[1][:-1]).all())
            self.can_run &= bool((self._order < len(self.parameters)).all())

    def __call__(self, hidden: torch.Tensor, sizes: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Multiply rows `[rows, in]`, sorted by expert, by each expert's weight; `sizes` is int64 `[experts]`."""
        trains = torch.is_grad_enabled()
        if self._linear is not None and (self._fp8 is None or trains and self._fp8.gradients is None):
            self._fp8 = _Fp8Products(self._linear, has_weight_gradients=self._has_block_scales)
        result: torch.Tensor = _PackedProduct.apply(hidden, self._anchor, self, sizes, self._fp8, trains)
        return result, None

    def weights(self, quantizer: Any = None, *, keep: bool = False) -> Any:
        """Describe the weights as one grouped tensor.

        Args:
            quantizer: makes an FP8 copy, which is described instead; None describes the weights themselves.
            keep: whether the copy is kept until `mimo.model.fp8.forget_weights`.
        """
        assert self._weights is not None
        if quantizer is None:
            return self._grouped(self.parameters[0].data, self._weights)
        keep |= self.keeps_copy
        copies = compat.fp8_copies(self._linear) if keep else {}
        if keep and WEIGHT not in copies:
            compat.renew_lasting_copy(self._linear, self.quantize_into)
        if WEIGHT not in copies:
            copies[WEIGHT] = self._quantize(quantizer)
        return copies[WEIGHT]

    def new_copy(self) -> Any:
        """Quantise the weights of a layer that may not have run yet."""
        assert self._linear is not None, "a layer with FP8 products"
        with get_fp8_context(self._linear.config):
            products = _Fp8Products(self._linear, has_weight_gradients=self._has_block_scales)
        self._fp8 = self._fp8 or products
        return self._quantize(products.weights)

    def quantize_into(self, copy: Any) -> None:
        """Quantise the weights again, into the memory of an earlier copy."""
        assert self._fp8 is not None, "the layer has made the copy"
        compat.overwrite_grouped_tensor(copy, self._quantize(self._fp8.weights))

    def _quantize(self, quantizer: Any) -> Any:
        import transformer_engine_torch as tex

        assert self._weights is not None
        count, (lowest, offsets) = len(self.parameters), self._weights
        rows = self.parameters[0].data.as_strided((count * self.out_features, self.in_features),
                                                  (self.in_features, 1), lowest)
        quantizer.set_usage(rowwise=True, columnwise=True)
        if self._has_block_scales:
            # The scales of a matrix do not lie side by side, so the matrices are first put in the order of the experts.
            rows = rows.view(count, self.out_features, self.in_features)[self._order].flatten(0, 1)
            return tex.group_quantize(rows, quantizer, count, None)
        found = tex.group_quantize(rows, quantizer, count, None)
        return compat.reordered_grouped_tensor(found, self._order, offsets, (self.out_features, self.in_features))

    def gradients(self) -> Any:
        """Describe the buffers of gradients as one grouped tensor."""
        assert self._gradients is not None
        return self._grouped(self.parameters[0].main_grad, self._gradients)

    def _grouped(self, first: torch.Tensor, position: tuple[int, torch.Tensor]) -> Any:
        # Offloading empties storages and fills them again between steps, so the view is made each time.
        count, (lowest, offsets) = len(self.parameters), position
        flat = first.as_strided((count * first.numel(),), (1,), lowest)
        shape = (self.out_features, self.in_features)
        return _grouped_tensor((count * shape[0], shape[1]), count, flat, offsets, shapes=[shape] * count)

    def register_gradients(self) -> None:
        """Tell the overlapped reduction that the gradients are ready, which parameter hooks do for other layers."""
        wrapper = self._wrapper
        assert wrapper is not None
        if not wrapper.ddp_config.overlap_grad_reduce:
            return
        for parameter in self.parameters:
            wrapper.param_to_bucket_group[parameter].register_grad_ready(parameter, wrapper.force_all_reduce)


def _offsets(tensors: list[torch.Tensor]) -> tuple[int, torch.Tensor] | None:
    """Find the positions of tensors in the storage that they share.

    Returns:
        The lowest of their storage offsets, and int64 `[tensors + 1]` on their device with each tensor's distance from
        it and the number of all elements. None if one begins at an address that cuBLASLt cannot read from.
    """
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1, "tensors in several storages"
    starts = [int(tensor.storage_offset()) for tensor in tensors]
    lowest = min(starts)
    if any(start % ALIGNMENT for start in starts):
        return None
    table = [start - lowest for start in starts] + [sum(tensor.numel() for tensor in tensors)]
    return lowest, torch.tensor(table, dtype=torch.int64, device=tensors[0].device)


class _Fp8Products:
    """Quantizers and options of a layer's FP8 products, from the recipe that Megatron Core has entered.

    With `tensorwise`, the gradients of weights are products in the model's precision. On an H200, FP8 products for them
    took as long in large microbatches of small experts and longer in small ones, and their operands would have to be
    quantised along the other axis, too.

    Attributes:
        has_weight_gradients: whether the gradients of weights are FP8 products, too.
    """

    def __init__(self, linear: Any, *, has_weight_gradients: bool) -> None:
        self.has_weight_gradients = has_weight_gradients
        self.rows, self.weights, self.gradients = compat.fp8_quantizers(linear)
        recipe = linear.fp8_meta["recipe"]
        self.split_forward, self.split_rows, self.split_weights = (
            product.use_split_accumulator
            for product in (recipe.fp8_gemm_fprop, recipe.fp8_gemm_dgrad, recipe.fp8_gemm_wgrad))


class _PackedProduct(torch.autograd.Function):
    """Product of rows with their experts' weights, which adds weight gradients to `main_grad` itself."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, anchor: torch.Tensor, layer: PackedLinear, sizes: torch.Tensor,
                fp8: _Fp8Products | None, trains: bool) -> torch.Tensor:
        """Multiply the rows. `PackedLinear` explains `anchor`; `trains` says whether a backward pass may follow."""
        from transformer_engine.pytorch.quantized_tensor import prepare_for_saving

        rows = hidden.reshape(-1, layer.in_features)
        sizes, in_offsets, out_offsets = _row_offsets(sizes, layer.in_features, layer.out_features)
        out = rows.new_empty(rows.shape[0], layer.out_features)
        saved: Any = rows
        if fp8 is None:
            if rows.shape[0]:
                _multiply(layer.weights(), _by_expert(rows, sizes, in_offsets), _by_expert(out, sizes, out_offsets),
                          "TN")
        elif rows.shape[0]:
            keeps_columns = fp8.has_weight_gradients and trains and layer.trains
            quantized = _quantized(rows, sizes, in_offsets, fp8.rows, rowwise=True, columnwise=keeps_columns)
            _multiply(layer.weights(fp8.weights, keep=trains), quantized, _by_expert(out, sizes, out_offsets), "TN",
                      split=fp8.split_forward)
            if fp8.has_weight_gradients:
                saved = quantized
                saved.rowwise_data = saved.scale_inv = None  # gradients of weights read columns
        tensors, ctx.tensor_objects = prepare_for_saving(saved, sizes, in_offsets, out_offsets)
        ctx.save_for_backward(*tensors)
        ctx.layer, ctx.shape, ctx.num_rows, ctx.fp8 = layer, hidden.shape, rows.shape[0], fp8
        return out.view(*hidden.shape[:-1], layer.out_features)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
        """Return the gradient of the rows, and add those of the weights to their buffers."""
        from transformer_engine.pytorch.quantized_tensor import restore_from_func_ctx

        rows, sizes, in_offsets, out_offsets = restore_from_func_ctx(ctx)
        layer: PackedLinear = ctx.layer
        fp8: _Fp8Products | None = ctx.fp8
        needs_rows = ctx.needs_input_grad[0]
        grad_rows = grad_output.reshape(-1, layer.out_features).contiguous()
        plain, quantized, grad_input = _by_expert(grad_rows, sizes, out_offsets), None, None
        if ctx.num_rows and fp8 is not None and (needs_rows or fp8.has_weight_gradients):
            quantized = _quantized(grad_rows, sizes, out_offsets, fp8.gradients, rowwise=needs_rows,
                                   columnwise=layer.trains and fp8.has_weight_gradients)
        if needs_rows:
            grad_input = grad_rows.new_empty(ctx.num_rows, layer.in_features)
            target = _by_expert(grad_input, sizes, in_offsets)
            if ctx.num_rows and fp8 is None:
                _multiply(layer.weights(), plain, target, "NN")
            elif ctx.num_rows and fp8 is not None:
                _multiply(layer.weights(fp8.weights, keep=True), quantized, target, "NN", split=fp8.split_rows)
            grad_input = grad_input.view(ctx.shape)
        if layer.trains:
            if ctx.num_rows and fp8 is not None and fp8.has_weight_gradients:
                _multiply(rows, quantized, layer.gradients(), "NT", accumulate=True, split=fp8.split_weights)
            elif ctx.num_rows:
                _multiply(_by_expert(rows, sizes, in_offsets), plain, layer.gradients(), "NT", accumulate=True)
            layer.register_gradients()
        return grad_input, None, None, None, None, None


def _quantized(rows: torch.Tensor, sizes: torch.Tensor, offsets: torch.Tensor, quantizer: Any, *, rowwise: bool,
               columnwise: bool) -> Any:
    """Quantise rows that are sorted by expert to FP8, with separate scales for each expert."""
    import transformer_engine_torch as tex

    quantizer.set_usage(rowwise=rowwise, columnwise=columnwise)
    return tex.group_quantize(rows, quantizer, sizes.numel(), sizes, tensor_offsets=offsets)


def _by_expert(rows: torch.Tensor, sizes: torch.Tensor, offsets: torch.Tensor) -> Any:
    """Describe rows that are sorted by expert as one grouped tensor."""
    return _grouped_tensor((rows.shape[0], rows.shape[1]), sizes.numel(), rows.reshape(-1), offsets, first_dims=sizes)


def _row_offsets(sizes: torch.Tensor, *widths: int) -> tuple[torch.Tensor, ...]:
    """Compute the index of the element at which each expert's rows begin, for each width of rows.

    Returns:
        `sizes`, and for each width int64 `[experts + 1]`, all on the device and in one allocation.
    """
    import transformer_engine_torch as tex

    sizes, offsets = tex.splits_to_offsets_multi(
        sizes, sizes.device, strides=list(widths), include_leading_zero=[True] * len(widths),
        dtypes=[torch.int64] * len(widths), bulk_allocate=True)
    return sizes, *offsets


def _grouped_tensor(shape: tuple[int, int], count: int, flat: torch.Tensor, offsets: torch.Tensor,
                    **sizes: Any) -> Any:
    from transformer_engine.pytorch.tensor.storage.grouped_tensor_storage import GroupedTensorStorage

    return GroupedTensorStorage(shape=shape, dtype=flat.dtype, num_tensors=count, quantizer=None, data=flat,
                                tensor_offsets=offsets, **sizes)


def _multiply(left: Any, right: Any, out: Any, layout: str, *, accumulate: bool = False, split: bool = False) -> None:
    from transformer_engine.pytorch.cpp_extensions.gemm import general_grouped_gemm_for_grouped_tensor

    general_grouped_gemm_for_grouped_tensor(left, right, out, layout=layout, accumulate=accumulate,
                                            use_split_accumulator=split)
