"""Checks of the flags of FP8 products, for `mimo.config.validate`: which may be combined, and which widths fit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mimo import registry
from mimo.config.checks import refuse
from mimo.config.trainer import RunConfig
from mimo.grid.spec import GridSpec, Layout
from mimo.protocols import LANGUAGE, Fp8, ParameterShape

# Linear parts of layers whose products are in FP8, under Megatron Core's names, by the side of the weight that tensor
# parallelism splits. A weight that is not split belongs to either.
SPLIT_BY_COLUMNS = frozenset({"linear_proj", "linear_fc2", "out_proj"})
WHOLE_UNLESS_LOCAL = frozenset({"linear_q_down_proj", "linear_kv_down_proj"})
SPLIT_BY_ROWS = WHOLE_UNLESS_LOCAL | {
    "linear_qkv", "linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "linear_fc1", "in_proj", "eh_proj",
    "fc1_latent_proj", "fc2_latent_proj"}
# Layers of multi-token prediction count as layers.
MTP = "mtp.layers."


def check_fp8(config: RunConfig, layout: Layout) -> None:
    """Refuse FP8 products that cannot run with these flags. The built model is checked again.

    Raises:
        ValueError: names flags, values and what would fit.
    """
    model = config.model
    refuse(model.encoder_fp8_format != "none" and not layout.encoders,
           f"a run without an encoder would ignore --encoder-fp8-format {model.encoder_fp8_format}: leave it out")
    language = model.fp8(LANGUAGE)
    if model.fp8_output_proj:
        refuse(language is None, "--fp8-output-proj needs --fp8-format e4m3 or hybrid")
        refuse(model.logits_chunk_size is not None, "--fp8-output-proj with --logits-chunk-size "
               f"{model.logits_chunk_size}: logits of parts of a row are computed in bfloat16; leave one of them out")
        refuse(model.fp8_format == "e4m3" and model.fp8_recipe == "tensorwise", "--fp8-output-proj with --fp8-format "
               "e4m3: with one scale, gradients of most logits would be rounded to zero; use hybrid, or --fp8-recipe "
               "blockwise")
    if language is not None and config.layout.sequence_parallel:
        (tokens, flags), multiple = config.text_tokens, language.multiple
        ranks = config.layout.llm_tp * config.layout.llm_cp
        refuse(tokens % (ranks * multiple) != 0,
               f"{language} with --sequence-parallel: {flags} over {ranks} ranks is not a multiple of {multiple} on "
               "each")
    provider = registry.model_provider(model.model_provider)
    for name, grid in layout.grids.items():
        fp8 = model.fp8(name)
        if fp8 is not None:
            shapes = provider.parameter_shapes(config.model_family, name)
            check_widths(weights_of_rank(shapes, grid, is_local=runs_local_layers(config)), fp8)
            if fp8.output_proj:
                _check_output_layer(shapes, grid, fp8)


def runs_local_layers(config: RunConfig) -> bool:
    """Return whether the flags say that layers are plain PyTorch's. `auto` may choose them, too."""
    return config.model.transformer_impl == "local" or config.train.device == "cpu"


def weights_of_rank(shapes: Iterable[ParameterShape], grid: GridSpec, *, is_local: bool) -> list[
        tuple[str, tuple[int, int]]]:
    """Return the names and shapes of the weights that FP8 products have on a rank, as far as their names are known.

    `is_local` says whether layers are plain PyTorch's, which also split the down projections of latent attention.
    """
    ways, found = {"none": 1, "tp": grid.tp, "expert": grid.expt_tp}, []
    for shape in shapes:
        *_, layer, kind = ("", *shape.name.split("."))
        split = ways[shape.split]
        if kind != "weight" or not (shape.stage == "layer" or shape.name.startswith(MTP)):
            continue
        if layer in SPLIT_BY_COLUMNS:
            found.append((shape.name, (shape.shape[0], shape.shape[1] // split)))
        elif layer in SPLIT_BY_ROWS:
            whole = layer in WHOLE_UNLESS_LOCAL and not is_local
            found.append((shape.name, (shape.shape[0] // (1 if whole else split), shape.shape[1])))
    return found


def check_widths(weights: Iterable[tuple[str, Sequence[int]]], fp8: Fp8) -> None:
    """Refuse weights of a rank, given by their names and shapes, whose rows or columns FP8 products cannot take."""
    wrong = [f"{name} {list(shape)}" for name, shape in weights if any(size % fp8.multiple for size in shape)]
    rest = f", and {len(wrong) - 3} more" if len(wrong) > 3 else ""
    refuse(bool(wrong),
           f"{fp8}: rows and columns of a rank's weights have to be multiples of {fp8.multiple}, and these are not: "
           f"{', '.join(wrong[:3])}{rest}. Use other widths or a smaller tensor-parallel size"
           + (", or tensorwise, which needs multiples of 16" if fp8.recipe == "blockwise" else ""))


def check_logits(shape: Sequence[int], fp8: Fp8) -> None:
    """Refuse the shape of a rank's output layer if FP8 products cannot take it."""
    refuse(any(size % fp8.multiple for size in shape),
           f"--fp8-output-proj: rows and columns of a rank's output layer, {list(shape)}, are not multiples of "
           f"{fp8.multiple}; pad the vocabulary (--make-vocab-size-divisible-by) or leave the flag out")


def _check_output_layer(shapes: Iterable[ParameterShape], grid: GridSpec, fp8: Fp8) -> None:
    """Check the output layer, or the embedding that is tied to it."""
    found = {shape.name: shape.shape for shape in shapes}
    rows, columns = found.get("output_layer.weight") or found.get("embedding.word_embeddings.weight") or (0, 0)
    # Otherwise the model has more rows of padding than planning knows of.
    if rows % grid.tp == 0:
        check_logits((rows // grid.tp, columns), fp8)


def check_fp8_primary_weights(config: RunConfig) -> None:
    """Refuse --fp8-primary-weights where something else needs weights in bfloat16 between updates."""
    model, frozen = config.model, config.model.frozen
    if not model.fp8_primary_weights:
        return
    provider = registry.model_provider(model.model_provider)
    trained = [module for module in (LANGUAGE, *provider.encoders(config.model_family)) if module not in frozen]
    refuse(not any(map(model.fp8, trained)), "--fp8-primary-weights needs --fp8-format or --encoder-fp8-format for a "
           "part of the model that trains")
    # On GPUs; local layers ignore --moe-gemm.
    has_experts = (LANGUAGE in trained and model.fp8(LANGUAGE) is not None and config.train.device != "cpu"
                   and provider.num_experts(config.model_family) > 0 and model.transformer_impl != "local")
    for flag, is_given, reason in (
            ("--no-bf16", not model.bf16, "the optimizer has no copies of float32 weights"),
            ("--no-use-distributed-optimizer", not config.optim.use_distributed_optimizer,
             "the gathers of the distributed optimizer make the weights after an update"),
            ("--use-precision-aware-optimizer", config.optim.use_precision_aware_optimizer,
             "the optimizer updates the bfloat16 weights themselves"),
            ("--overlap-param-gather", config.ddp.overlap_param_gather, "weights are gathered during the next pass"),
            (f"--moe-gemm {model.moe_gemm}", has_experts and model.moe_gemm == "separate",
             "it quantises the weights of experts in every pass"),
            ("--deterministic-mode", has_experts and config.train.deterministic_mode,
             "then products of experts are separate and quantise their weights in every pass")):
        refuse(is_given, f"--fp8-primary-weights with {flag}: {reason}; leave out one of the two")
