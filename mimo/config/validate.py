"""Checks of a run's flags before it starts, without process groups or a GPU.

Each section checks itself; this module calls those checks and adds the rules that concern several sections.
"""

from __future__ import annotations

import difflib
import itertools
import math
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from mimo import registry
from mimo.config.checks import check_packages, refuse
from mimo.config.optim import ScheduleConfig
from mimo.config.toml_file import field_name, flag_name, flag_words
from mimo.config.trainer import LayoutConfig, ModelConfig, ObserveConfig, RunConfig
from mimo.config.validate_fp8 import check_fp8, check_fp8_primary_weights, runs_local_layers
from mimo.grid.lanes import data_request, lanes_read_by, sequence_multiple
from mimo.grid.layout import build_layout, required_world_size, validate_layout
from mimo.grid.spec import Layout
from mimo.protocols import (
    LANGUAGE,
    CheckedDataProvider,
    ComparableProvider,
    DataProvider,
    Lane,
    MegatronSourceProvider,
    RoutedDataProvider,
    TokenSpec,
)

PROJECTOR = "projector"
# Most iterations that prefetch may read ahead, because a reader of lanes remembers its position for a few only.
MAX_STEPS_AHEAD = 4
# Parts of --recompute-modules that Megatron Core recomputes without keeping their output.
NO_GRAPHS_IF_RECOMPUTED = frozenset({"layernorm", "moe_act", "mla_up_proj"})
# Flags of the layers of a mixture of experts.
FLAGS_OF_EXPERTS = ("moe_token_dispatcher_type", "moe_shared_expert_overlap", "moe_gemm", "moe_permute_fusion",
                    "moe_router_fusion")
# Default of --row-lengths.
ROW_LENGTHS = 16
# Samples that are searched for images before a run without an encoder.
CHECKED_SAMPLES = 64


def check_observe(flags: ObserveConfig, world_size: int, length: int | None, *, dry_run: bool) -> None:
    """Check the flags of logging and measurement against the rest of the run.

    On a dry run, which may have no length, packages may be missing.

    Raises:
        ValueError: the first thing found wrong.
    """
    steps, ranks = flags.profiled_steps, flags.profiled_ranks
    refuse(length is not None and bool(steps) and steps.start > length,
           f"--profile-steps {flags.profile_steps} begins after the run's last iteration, {length}")
    refuse(max(ranks, default=0) >= world_size,
           f"--profile-ranks {flags.profile_ranks}: this run has ranks 0 to {world_size - 1}")
    if not dry_run:
        check_packages(flags)


def check_device(flags: ObserveConfig, device: str) -> None:
    """Refuse flags that need a GPU on a run without one. Raises ValueError."""
    for flag, given in (("--memory-snapshot", flags.memory_snapshot), ("--nvtx", flags.nvtx)):
        refuse(given and device != "cuda", f"{flag} needs CUDA, and this run is on {device}: leave it out")


def check_prefetch(config: RunConfig, layout: Layout, num_microbatches: int) -> None:
    """Check --encoder-prefetch-depth.

    Raises:
        ValueError: the depth does not fit the run; names flags and values.
    """
    depth, frozen = config.train.encoder_prefetch_depth, config.model.frozen
    flag = f"--encoder-prefetch-depth {depth}"
    refuse(depth < 0, f"{flag} is below 0; 0 is off")
    if not depth:
        return
    refuse(not layout.encoders, f"{flag}: a run without encoder has nothing to prefetch; leave it out")
    refuse(layout.kind != "disjoint", f"{flag} with --layout {layout.kind}: ranks that hold both modules have no time "
           "to spare; use --layout disjoint, or leave it out")
    trains = [encoder.name for encoder in layout.encoders if encoder.name not in frozen]
    refuse(bool(trains), f"{flag} with --freeze {config.model.freeze!r}: {', '.join(trains)} trains, and its features "
           f"would be those of weights from before the step; add {','.join(trains)} to --freeze, or leave it out")
    stages = max(encoder.pp for encoder in layout.encoders)
    refuse(stages > 1, f"{flag} with --encoder-pp {stages}: only an encoder of one stage is prefetched; use "
           "--encoder-pp 1 (--encoder-tp may be above 1)")
    refuse(steps_ahead(depth, num_microbatches) > MAX_STEPS_AHEAD,
           f"{flag}: an iteration has {num_microbatches} microbatches (--global-batch-size "
           f"{config.train.global_batch_size}), and data is read at most {MAX_STEPS_AHEAD} iterations ahead; at most "
           f"{MAX_STEPS_AHEAD * num_microbatches}")


def check_run_ahead(config: RunConfig, layout: Layout) -> None:
    """Check --encoder-run-ahead. Raises ValueError if it cannot be honoured; names flags and values."""
    ahead, depth = config.layout.encoder_run_ahead, config.train.encoder_prefetch_depth
    flag = f"--encoder-run-ahead {ahead}"
    if not ahead:
        return
    refuse(not layout.encoders, f"{flag}: a run without encoder has nothing to run ahead; leave it out")
    refuse(layout.kind != "disjoint", f"{flag} with --layout {layout.kind}: ranks that hold both modules do not wait "
           "for each other; use --layout disjoint, or leave it out")
    refuse(depth != 0, f"{flag} with --encoder-prefetch-depth {depth}: a frozen encoder that prefetches runs ahead "
           "already, also of the iteration; leave one of them out")


def steps_ahead(depth: int, num_microbatches: int) -> int:
    """Return for how many iterations after the present one a queue of `depth` microbatches may need data."""
    return -(-depth // num_microbatches)


def validate(config: RunConfig, world_size: int, rank: int = 0) -> Layout:
    """Check a whole run and return its layout.

    A dry run needs no length. Data that is costly to open is checked only by the ranks that read it, among them always
    the first one.

    Raises:
        ValueError: the first thing found wrong, naming flags, values and what would fit.
    """
    layout = validate_without_data(config, world_size)
    check_data(config, layout, rank)
    return layout


def validate_without_data(config: RunConfig, world_size: int) -> Layout:
    """Check everything but the data of a run, which may be costly to open, and return the run's layout.

    Raises:
        ValueError: as `validate`.
    """
    provider, train = registry.model_provider(config.model.model_provider), config.train
    if train.world_size is not None and not train.dry_run and train.world_size != world_size:
        raise ValueError(f"--world-size {train.world_size} is for --dry-run; this run has {world_size} ranks")
    layout = build_layout(config.layout, world_size, _encoders(config))
    validate_layout(layout, micro_batch_size=train.micro_batch_size, lane_rows=config.lane_rows,
                    global_batch_size=train.global_batch_size,
                    num_experts=provider.num_experts(config.model_family),
                    sequence_parallel=config.layout.sequence_parallel)
    for section in (train, config.model, config.data, config.optim, config.schedule, config.ddp, config.checkpoint,
                    config.observe):
        section.check()
    usual = (0, type(train).num_generations)
    refuse(not config.reads_prompts and not train.eval_iters and train.num_generations not in usual,
           f"--num-generations {train.num_generations} with --eval-iters 0: held-out samples are decoded at the end of "
           "the last evaluation; set --eval-iters")
    _check_sequence(config)
    _check_model(config, layout)
    check_prefetch(config, layout, num_microbatches(config))
    check_run_ahead(config, layout)
    _check_schedule(config)
    _check_precision_aware(config)
    check_fp8_primary_weights(config)
    lengths = config.data.row_lengths or 1
    refuse(lengths > 1 and _gathers_rows(config, layout),
           f"--row-lengths {lengths}: with --moe-token-dispatcher-type allgather, the ranks that gather each other's "
           "tokens need rows of one length; leave out one of the two")
    _check_graphs(config)
    _check_ddp(config, layout)
    _check_checkpoint(config, layout)
    provider.validate(config.model_family, layout, train.seq_length)
    check_fp8(config, layout)
    length = None if train.train_iters is None and train.train_samples is None else train_iterations(config)
    check_observe(config.observe, world_size, length, dry_run=train.dry_run)
    if train.device != "auto":  # auto depends on the machine, so the run checks it once it knows the device
        check_device(config.observe, train.device)
    return layout


def row_multiple(config: RunConfig, layout: Layout) -> int:
    """Return the number of tokens of which the rows of a microbatch have a multiple, or all of --seq-length.

    Tensor-parallel ranks share the tokens of a row with sequence parallelism, context-parallel ranks always, and FP8
    products take multiples of their own on each. Kernels prefer multiples of 8.
    """
    train, language = config.train, layout.language
    if _gathers_rows(config, layout):
        return train.seq_length
    fp8 = config.model.fp8(LANGUAGE)
    unit = math.lcm(8, language.tp * sequence_multiple(layout), 1 if fp8 is None else language.tp * language.cp
                    * fp8.multiple)
    share = -(-train.seq_length // (config.data.row_lengths or ROW_LENGTHS))
    return min(-(-share // unit) * unit, train.seq_length)


def _gathers_rows(config: RunConfig, layout: Layout) -> bool:
    """Return whether ranks gather each other's tokens, for which all rows need --seq-length tokens."""
    return config.model.moe_token_dispatcher_type == "allgather" and layout.language.ep * layout.language.expt_tp > 1


def _check_graphs(config: RunConfig) -> None:
    """Refuse CUDA graphs of what they cannot contain. The built model is checked again."""
    model, layout, family = config.model, config.layout, vars(config.model_family)
    if not model.cuda_graphs:
        return
    balancing = family.get("moe_router_load_balancing_type")
    # Ranks that exchange tokens have graphs of what comes before that in each layer, unless all sizes are known.
    exchanges = exchanges_tokens(layout) and not model.moe_static_rows
    # The host must not know how many tokens each expert gets.
    counts = not exchanges and registry.model_provider(model.model_provider).num_experts(config.model_family) > 0
    overlaps = overlaps_beside_graphs(config)
    dropout = {name: family.get(name) or 0.0 for name in ("hidden_dropout", "attention_dropout")}
    for flags, is_given, reason in (
            *((f"{flag_name(name)} {share}", share > 0, "a replay would draw the same numbers again")
              for name, share in dropout.items()),
            (f"{flag_name('moe_router_force_load_balancing')}", family.get("moe_router_force_load_balancing", False),
             "a replay would draw the same numbers again"),
            (f"--model-provider {model.model_provider}", "kv_lora_rank" in family,
             "latent attention keeps rotary positions in a cache that may move them"),
            (f"--moe-gemm {model.moe_gemm}", counts and model.moe_gemm in ("cutlass", "separate"),
             "the host waits for the number of tokens of each expert"),
            (f"--moe-token-dispatcher-type {model.moe_token_dispatcher_type}",
             counts and model.moe_token_dispatcher_type == "allgather" and not model.moe_static_rows,
             "the host waits for the number of tokens of each expert"),
            (f"--recompute-modules {','.join(model.recomputed_modules(LANGUAGE))}",
             not NO_GRAPHS_IF_RECOMPUTED.isdisjoint(model.recomputed_modules(LANGUAGE)),
             f"recomputing {', '.join(sorted(NO_GRAPHS_IF_RECOMPUTED))} sets random generators"),
            (f"--fp8-format {model.fp8_format} and --recompute {model.recompute}",
             model.fp8_format != "none" and model.recompute != "none",
             "Transformer Engine sets random generators where it recomputes FP8 layers"),
            (f"--llm-cp {layout.llm_cp}", layout.llm_cp > 1, "long rows keep the GPU busy without them"),
            (f"--llm-ep {layout.llm_ep}, --llm-expt-tp {layout.llm_expt_tp} and --recompute full",
             exchanges and model.recompute == "full",
             "graphs of ranks that exchange tokens contain only parts of layers, and none if these are recomputed "
             "(--moe-static-rows makes graphs of whole layers)"),
            (f"--moe-router-load-balancing-type {balancing} and --llm-dp {layout.llm_dp}",
             balancing == "global_aux_loss" and layout.llm_dp > 1,
             "lanes add up their loads, and rows of one may have graphs when those of another have not"),
            ("--moe-shared-expert-overlap", model.moe_shared_expert_overlap,
             "graphs compute shared experts before tokens are exchanged"),
            ("--fp8-primary-weights", model.fp8_primary_weights,
             "graphs keep the memory of activations during updates, so it would save nothing"),
            (f"{' and '.join(overlaps)} and --global-batch-size {config.train.global_batch_size}",
             0 < num_microbatches(config) <= len(overlaps),
             "the first microbatch of a step has no graphs if weights are gathered, the last one if gradients are "
             f"reduced, and there are {num_microbatches(config)}")):
        refuse(is_given, f"--cuda-graphs with {flags}: {reason}; leave out one of the two")


def overlaps_beside_graphs(config: RunConfig) -> dict[str, int]:
    """Return the flags that take the graphs from a microbatch of each step: 0 for the first one, -1 for the last."""
    found = {"--overlap-param-gather": 0} if config.ddp.overlap_param_gather else {}
    # Later stages of a pipeline do not know before a forward pass which one is the last.
    if config.ddp.overlap_grad_reduce and config.layout.llm_pp == 1:
        found["--overlap-grad-reduce"] = -1
    return found


def exchanges_tokens(layout: LayoutConfig) -> bool:
    """Return whether ranks of the language model exchange the tokens of experts."""
    return layout.llm_ep * layout.llm_expt_tp > 1


def share_with_graphs(config: RunConfig) -> float:
    """Return the share of microbatches whose layers are replayed from CUDA graphs.

    If ranks exchange tokens, graphs contain parts of these layers. How much that gains with --llm-expt-tp has not been
    measured, so it counts as nothing.
    """
    if config.layout.llm_expt_tp > 1:
        return 0.0
    without = len(overlaps_beside_graphs(config)) / max(num_microbatches(config), 1)
    return max(1.0 - without, 0.0) if config.model.cuda_graphs else 0.0


def may_have_graphs(config: RunConfig) -> bool:
    """Return whether a run on GPUs that can multiply by all experts at once may have --cuda-graphs."""
    model = config.model
    if model.transformer_impl == "local":
        return False
    has_experts = registry.model_provider(model.model_provider).num_experts(config.model_family) > 0
    captures_experts = has_experts and (not exchanges_tokens(config.layout) or model.moe_static_rows)
    if captures_experts and (not model.bf16 or config.train.deterministic_mode):
        return False
    try:
        _check_graphs(replace(config, model=replace(model, cuda_graphs=True)))
    except ValueError:
        return False
    return True


def num_microbatches(config: RunConfig) -> int:
    """Return the number of microbatches of one lane in one iteration."""
    return config.train.global_batch_size // (config.train.micro_batch_size * config.layout.llm_dp)


def resolved_family(config: RunConfig) -> Any:
    """Return the model family's flags with the sizes of --hf-config, if it is given."""
    provider = registry.model_provider(config.model.model_provider)
    return provider.resolved(config.model_family) if isinstance(provider, ComparableProvider) else config.model_family


def num_layers(config: RunConfig) -> int:
    """Number of layers of the language model.

    A provider without a field or property of this name may have one kind of layer only.
    """
    family = resolved_family(config)
    if hasattr(family, "num_layers"):
        return int(family.num_layers)
    shapes = registry.model_provider(config.model.model_provider).parameter_shapes(family, LANGUAGE)
    # An expert's shape counts once for each expert of each layer.
    return max((shape.count for shape in shapes if shape.stage == "layer" and shape.split != "expert"), default=0)


def layers_of_stages(config: RunConfig, layout: Layout) -> tuple[int, ...]:
    """Number of language layers on each pipeline stage."""
    stages = layout.language.pp
    return layout.language.stage_layers or (-(-num_layers(config) // stages),) * stages


def can_recompute_some_layers(config: RunConfig) -> bool:
    """Return whether the layers of a stage can be recomputed in part, which those of a hybrid model cannot."""
    return "hybrid_layer_pattern" not in vars(config.model_family)


def train_iterations(config: RunConfig) -> int:
    """Return the length of the run in iterations. The last one may exceed --train-samples."""
    if config.train.train_samples is not None:
        return -(-config.train.train_samples // config.train.global_batch_size)
    if config.train.train_iters is None:
        raise ValueError("the run has no length: set --train-iters or --train-samples")
    return config.train.train_iters


def run_world_size(config: RunConfig, environment: Mapping[str, str]) -> int:
    """Return the number of ranks: torchrun's, or for a dry run --world-size or as many as the grids need.

    Raises:
        ValueError: the grids need several ranks and torchrun was not used, or `build_layout` refuses the layout.
    """
    if config.train.dry_run and config.train.world_size is not None:
        return config.train.world_size
    if "WORLD_SIZE" in environment:
        return int(environment["WORLD_SIZE"])
    needed = required_world_size(config.layout, _encoders(config))
    refuse(needed > 1 and not config.train.dry_run,
           f"the grids need {needed} ranks and this is one process: start it with torchrun --nproc-per-node {needed} "
           "(over several hosts, that many in all), or see the plan with --dry-run")
    return needed


def _encoders(config: RunConfig) -> tuple[str, ...]:
    encoders: tuple[str, ...] = registry.model_provider(config.model.model_provider).encoders(config.model_family)
    return encoders


def _check_sequence(config: RunConfig) -> None:
    train = config.train
    refuse(config.layout.cp_comm_type != LayoutConfig.cp_comm_type and config.layout.llm_cp == 1,
           f"--cp-comm-type {config.layout.cp_comm_type} needs --llm-cp above 1; leave it out")
    chunk = config.model.logits_chunk_size
    refuse(chunk is not None and chunk < train.micro_batch_size, f"--logits-chunk-size {chunk} is below "
           f"--micro-batch-size {train.micro_batch_size}: a chunk holds at least one token of every row")
    tp, family = config.layout.llm_tp, vars(resolved_family(config))
    heads = family.get("num_query_groups") or family.get("num_attention_heads")
    # Transformer Engine shares heads out. Local layers, which every run on CPUs has, gather keys and values instead.
    if config.layout.cp_comm_type == "a2a" and heads and not runs_local_layers(config):
        check_shared_heads(heads, tp, config.layout.llm_cp)
    refuse(config.layout.sequence_parallel and train.seq_length % tp != 0,
           f"--seq-length {train.seq_length} is not divisible by --llm-tp {tp}, which --sequence-parallel needs; "
           f"nearest are {train.seq_length // tp * tp or tp} and {-(-train.seq_length // tp) * tp}")


def check_shared_heads(heads: int, tp: int, cp: int) -> None:
    """Refuse key and value heads that --cp-comm-type a2a cannot share out among context-parallel ranks."""
    groups = max(heads // tp, 1)
    refuse(groups % cp != 0, f"--cp-comm-type a2a: the {groups} key and value heads of a tensor-parallel rank ({heads} "
           f"in all, --llm-tp {tp}) are not divisible by --llm-cp {cp}; use --cp-comm-type p2p or all_gather, or "
           "--transformer-impl local")


def _check_model(config: RunConfig, layout: Layout) -> None:
    model = config.model
    encoders = tuple(grid.name for grid in layout.encoders)
    known = (*encoders, PROJECTOR, LANGUAGE) if encoders else (LANGUAGE,)
    unknown, parts = ", ".join(sorted(model.frozen - set(known))), ", ".join(known)
    refuse(bool(unknown), f"--freeze {model.freeze}: unknown part {unknown}; known are {parts}")
    refuse(model.frozen >= set(known), f"--freeze {model.freeze} leaves nothing to train; the parts are {parts}")
    refuse(model.transformer_impl == "transformer_engine" and config.train.device == "cpu",
           "--transformer-impl transformer_engine needs CUDA, and --device is cpu; use --transformer-impl local")
    provider = registry.model_provider(model.model_provider)
    if not provider.num_experts(config.model_family):
        given = [" ".join(flag_words(name, vars(model)[name])) for name in FLAGS_OF_EXPERTS
                 if vars(model)[name] != vars(ModelConfig())[name]]
        given += ["--moe-per-layer-logging"] if config.observe.moe_per_layer_logging else []
        refuse(bool(given), f"--model-provider {model.model_provider} has no experts here and would ignore "
               f"{', '.join(given)}: leave it out")
    if model.moe_static_rows:
        refuse(not exchanges_tokens(config.layout), "--moe-static-rows is for experts on several ranks (--llm-ep, "
               "--llm-expt-tp); leave it out")
        refuse(config.train.deterministic_mode, "--moe-static-rows with --deterministic-mode, which multiplies by one "
               "expert after the other; leave out one of the two")
    if model.recompute_num_layers is not None:
        largest = max(layers_of_stages(config, layout))
        refuse(model.recompute_num_layers > largest,
               f"--recompute-num-layers {model.recompute_num_layers}: a pipeline stage has {largest} layers at most")
        refuse(not can_recompute_some_layers(config), f"--recompute-num-layers {model.recompute_num_layers}: Megatron "
               "Core recomputes all layers of a hybrid model or none; leave it out")
    gib = config.layout.encoder_activation_gib
    refuse(gib is not None and model.frozen >= set(encoders), f"--encoder-activation-gib {gib} with --freeze "
           f"{model.freeze}: a frozen encoder keeps no activations; leave it out")
    refuse(gib is not None and model.encoder_recompute != "none", f"--encoder-activation-gib {gib} with "
           f"--encoder-recompute {model.encoder_recompute}, which already decides what is kept; leave one of them out")
    refuse(bool(encoders) and model.encoder_recompute != "none" and model.frozen >= set(encoders),
           f"--encoder-recompute {model.encoder_recompute} with --freeze {model.freeze}: a frozen encoder keeps no "
           "activations; leave it out")
    if not encoders:
        refuse(model.encoder_recompute != "none", "a run without an encoder would ignore --encoder-recompute "
               f"{model.encoder_recompute}: leave it out")
    if not encoders or model.frozen >= {*encoders, PROJECTOR}:
        # The stages of a recipe share the rates of parts that some of them freeze.
        given = [f"{flag_name(name)} {getattr(config.optim, name)}"
                 for name in ("encoder_lr", "projector_lr", "encoder_weight_decay")
                 if not encoders and getattr(config.optim, name) is not None]
        if config.ddp.encoder_ddp_overlap:
            given.append("--encoder-ddp-overlap")
        if config.optim.correct_encoder_grad_for_partial_participation:
            given.append("--correct-encoder-grad-for-partial-participation")
        refuse(bool(given), f"a run {f'with --freeze {model.freeze}' if encoders else 'without an encoder'} would "
               f"ignore {', '.join(given)}: leave it out")


def _check_schedule(config: RunConfig) -> None:
    """Refuse schedule flags that contradict each other or would be ignored."""
    schedule, train, style = config.schedule, config.train, config.schedule.lr_decay_style
    unit, other = ("samples", "iters") if train.train_samples is not None else ("iters", "samples")
    for kind in ("warmup", "decay", "wsd_decay"):
        value = getattr(schedule, f"lr_{kind}_{other}")
        refuse(bool(value) and (train.train_iters is not None or train.train_samples is not None),
               f"--lr-{kind.replace('_', '-')}-{other} {value} with --train-{unit}: the schedule counts {unit}, "
               f"use --lr-{kind.replace('_', '-')}-{unit}")
    for name in ("lr", "encoder_lr", "projector_lr"):
        peak = vars(config.optim)[name]
        refuse(peak is not None and schedule.lr_warmup_init > peak,
               f"--lr-warmup-init {schedule.lr_warmup_init} is above {flag_name(name)} {peak}")
    refuse(schedule.lr_warmup_init > 0 and not (schedule.lr_warmup_iters or schedule.lr_warmup_samples),
           f"--lr-warmup-init {schedule.lr_warmup_init} needs --lr-warmup-{unit}")
    decay, wsd_decay = getattr(schedule, f"lr_decay_{unit}"), getattr(schedule, f"lr_wsd_decay_{unit}")
    if style == "constant" and decay is not None:
        raise ValueError(f"--lr-decay-{unit} {decay} with --lr-decay-style constant, which does not decay")
    refuse(style == "constant" and config.optim.min_lr > 0,
           f"--min-lr {config.optim.min_lr} with --lr-decay-style constant, which does not decay; leave one out")
    if style == "WSD":
        refuse(wsd_decay is None, f"--lr-decay-style WSD needs --lr-wsd-decay-{unit}, the length of its final decay")
    else:
        refuse(wsd_decay is not None, f"--lr-wsd-decay-{unit} {wsd_decay} needs --lr-decay-style WSD, it is {style}")
        refuse(schedule.lr_wsd_decay_style != ScheduleConfig().lr_wsd_decay_style,
               f"--lr-wsd-decay-style {schedule.lr_wsd_decay_style} needs --lr-decay-style WSD, it is {style}")
    # Warm-up and decay have to fit into the run. A dry run may have no length.
    length, warmup = getattr(train, f"train_{unit}"), getattr(schedule, f"lr_warmup_{unit}")
    refuse(length is not None and bool(warmup) and warmup >= length,
           f"--lr-warmup-{unit} {warmup} is not shorter than the run, --train-{unit} {length}")
    refuse(decay is not None and bool(warmup) and warmup >= decay,
           f"--lr-warmup-{unit} {warmup} is not shorter than --lr-decay-{unit} {decay}")
    final = wsd_decay or 0
    whole, source = (decay, f"--lr-decay-{unit}") if decay is not None else (length, f"--train-{unit}")
    refuse(whole is not None and warmup + final > whole,
           f"--lr-warmup-{unit} {warmup} + --lr-wsd-decay-{unit} {final} is longer than {source} {whole}")


def _check_precision_aware(config: RunConfig) -> None:
    optim = config.optim
    if not optim.use_precision_aware_optimizer:
        return
    refuse(config.train.device == "cpu", "--use-precision-aware-optimizer needs CUDA and Transformer Engine's Adam, "
           "and --device is cpu; leave it out")
    refuse(not config.model.bf16, "--use-precision-aware-optimizer with --no-bf16: float32 weights have no copy that "
           "could be stored in 16 bits; leave it out or give --bf16")
    reduced = "fp32" if config.ddp.grad_reduce_in_fp32 else "bf16"
    refuse(optim.main_grads_dtype != reduced,
           f"--main-grads-dtype {optim.main_grads_dtype} with --{'' if reduced == 'fp32' else 'no-'}grad-reduce-in-"
           f"fp32: gradients are accumulated in {reduced}, and Adam reads them as they are; give --main-grads-dtype "
           f"{reduced}")


def _check_ddp(config: RunConfig, layout: Layout) -> None:
    ddp = config.ddp
    refuse(ddp.overlap_param_gather and not config.optim.use_distributed_optimizer,
           "--overlap-param-gather needs --use-distributed-optimizer, it is --no-use-distributed-optimizer")
    refuse(ddp.ddp_pad_buckets_for_high_nccl_busbw and not config.optim.use_distributed_optimizer,
           "--ddp-pad-buckets-for-high-nccl-busbw needs --use-distributed-optimizer, it is "
           "--no-use-distributed-optimizer")
    for flag, is_given in (("--overlap-grad-reduce", ddp.overlap_grad_reduce and not ddp.encoder_ddp_overlap),
                           ("--overlap-param-gather", ddp.overlap_param_gather)):
        refuse(is_given and LANGUAGE in config.model.frozen, f"{flag} with --freeze {config.model.freeze}: frozen "
               "parts have nothing to reduce or gather; leave it out")
    if layout.encoder_window is not None:
        where = f"encoder windows (--encoder-window {layout.encoder_window})"
        refuse(ddp.encoder_ddp_overlap,
               f"--encoder-ddp-overlap with {where}: the encoders' last backward pass ends the iteration, so there is "
               "nothing to overlap with; leave it out")
        refuse(config.optim.correct_encoder_grad_for_partial_participation,
               f"--correct-encoder-grad-for-partial-participation with {where}: all replicas share all images; leave "
               "it out")


def check_data(config: RunConfig, layout: Layout, rank: int = 0) -> None:
    """Let the data set check its flags, and refuse images in a run without an encoder.

    A data set that is read lane by lane is checked on the ranks that read it. Any other data set is checked everywhere.

    Raises:
        ValueError: the data set's flags or files do not fit the run.
    """
    dataset = config.find_dataset(config.data.dataset_provider)
    provider, train = registry.model_provider(config.model.model_provider), config.train
    if not isinstance(dataset, RoutedDataProvider):
        if isinstance(dataset, CheckedDataProvider) and not config.reads_prompts:
            try:
                dataset.validate(config.dataset, provider.token_spec(config.model_family))
            except OSError as error:
                raise ValueError(f"--dataset-provider {config.data.dataset_provider}: {error}") from error
        if config.layout.llm_only:
            _refuse_images(config, dataset, provider.token_spec(config.model_family))
        return
    if not lanes_read_by(layout, rank):
        return
    for split in ("train", "valid") if train.eval_iters else ("train",):
        request = data_request(
            layout, provider, config.model_family, micro_batch_size=train.micro_batch_size,
            seq_length=train.seq_length, seed=train.seed, split=split)
        if not layout.encoders:
            request = replace(request, tokens=replace(request.tokens, image_token_id=-1))
        dataset.validate(config.dataset, request)


def _refuse_images(config: RunConfig, dataset: DataProvider, tokens: TokenSpec) -> None:
    """Refuse a data set with images among its first samples; the run has no encoder for them."""
    stream = dataset.stream(config.dataset, tokens, Lane(LANGUAGE, 0, 1, config.train.seed, "train"))
    for sample in itertools.islice(stream, CHECKED_SAMPLES):
        refuse(bool(sample.image_sizes), f"--llm-only: sample {sample.key} of --dataset-provider "
               f"{config.data.dataset_provider} has images, and the run has no encoder for them; "
               "choose text-only data (such as --mock-text-only-fraction 1 or --digits-text-only-fraction "
               "1), or leave out --llm-only")


def check_allowed_differences(config: RunConfig) -> None:
    """Raise ValueError for a key of --allow-difference that is not a flag of the run."""
    known = [field.name for section in vars(config).values() if section is not None for field in fields(section)]
    for key in config.checkpoint.allow_difference:
        if field_name(key) not in known:
            near = difflib.get_close_matches(field_name(key), known, n=3, cutoff=0.6)
            hint = f"; did you mean {' or '.join(flag_name(name)[2:] for name in near)}?" if near else ""
            raise ValueError(f"--allow-difference {key}: the run has no flag {flag_name(field_name(key))}; give the "
                             f"name of a flag whose value may differ, such as norm-epsilon{hint}")


def _check_checkpoint(config: RunConfig, layout: Layout) -> None:
    flags = config.checkpoint
    check_allowed_differences(config)
    if not layout.encoders:
        refuse(bool(flags.load_vision_from), "a run without an encoder would ignore --load-vision-from "
               f"{flags.load_vision_from}: leave it out")
        refuse(bool(flags.load_hf and flags.load_language_from), f"--load-hf {flags.load_hf} with --load-language-from "
               f"{flags.load_language_from} in a run without an encoder leaves nothing for it to give: leave one out")
    provider = registry.model_provider(config.model.model_provider)
    source = provider.megatron_source(config.model_family) if isinstance(provider, MegatronSourceProvider) else None
    if source is not None and flags.has_pretrained:
        given = [flag_name(name) for name in ("load_hf", "load_vision_from", "load_language_from") if vars(flags)[name]]
        raise ValueError(f"{source.flag} {source.path} gives the weights of every module; {' and '.join(given)} would "
                         "give some of them again: leave one out")
