"""Builds this rank's model from flags and a provider: specs, freezing, precision, data-parallel wrapping."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.mimo.config import MimoModelConfig
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from mimo.config.trainer import RunConfig
from mimo.config.validate import check_shared_heads
from mimo.grid.groups import Grids
from mimo.grid.spec import GridSpec
from mimo.model import compat
from mimo.model.cuda_graphs import replay_decoder
from mimo.model.fp8 import use_fp8
from mimo.model.language import PaddedVocabulary
from mimo.model.layer_ops import (
    accumulate_into_main_grad,
    call_norm_kernels,
    install_rotary,
    install_split,
    skip_dropout_generators,
)
from mimo.model.mimo_model import HeteroModel
from mimo.model.moe import install_padded_routing
from mimo.model.packed_experts import choose_grouped_gemm
from mimo.model.recompute import prepare_recomputation, recompute_frozen
from mimo.observability.spans import Spans
from mimo.platform import quieten_transformer_engine
from mimo.platform.base import Platform
from mimo.protocols import LANGUAGE, BuildContext, ModelProvider
from mimo.watchdog.watchdog import Watchdog

logger = logging.getLogger(__name__)

# Parts of a rank's training state that can be offloaded to the host.
WEIGHTS, GRADIENTS, OPTIMIZER = "weights", "gradients", "optimizer"
KINDS = (WEIGHTS, GRADIENTS, OPTIMIZER)
# Added to the run's seed, so that each module draws from its own stream wherever it is placed.
ENCODER_SEED_OFFSET = 10_000
LANGUAGE_SEED_OFFSET = 20_000


class OffloadedError(RuntimeError):
    """An operation needs training state that is offloaded to the host."""


class Residency:
    """Record of which training state of this rank is offloaded, and which is on its way back.

    Attributes:
        offloaded: the `KINDS` that have no memory on the device.
        arriving: the `KINDS` that have memory again but not yet their contents, each with a function that waits for
            these.
    """

    def __init__(self) -> None:
        self.offloaded: set[str] = set()
        self.arriving: dict[str, Callable[[], None]] = {}

    def require(self, purpose: str, *kinds: str, waits: bool = True) -> None:
        """Make sure that `kinds`, which `purpose` needs, are on the device.

        Args:
            purpose: begins the error message.
            kinds: some of `KINDS`.
            waits: whether to wait for those that are arriving.

        Raises:
            OffloadedError: some of them are offloaded.
        """
        missing = [kind for kind in KINDS if kind in kinds and kind in self.offloaded]
        if missing:
            raise OffloadedError(f"{purpose}: {', '.join(missing)} of this trainer are offloaded to the host; bring "
                                 "them back first (mimo.rl.offload.Offload.bring_back)")
        for kind in kinds if waits else ():
            self.wait_for(kind)

    def wait_for(self, kind: str) -> None:
        """Wait until one kind has arrived, if it is arriving."""
        wait = self.arriving.pop(kind, None)
        if wait is not None:
            wait()


@dataclass
class BuiltModel:
    """This rank's model and what a training step needs to know about it.

    Attributes:
        model: the multimodal model.
        wrapped: DDP wrapper of each module that trains, for modules of this rank.
        trainable: every module of this rank -> whether any rank of its grid has a parameter that trains.
        params_dtype: dtype of parameters and activations.
        residency: what of the training state is offloaded.
        restore_weights: makes weights that have no memory between updates; None without such weights. Collective.
    """

    model: HeteroModel
    wrapped: dict[str, DistributedDataParallel]
    trainable: dict[str, bool]
    params_dtype: torch.dtype
    residency: Residency = field(default_factory=Residency)
    restore_weights: Callable[[], None] | None = None

    def finish_gathers(self, purpose: str) -> None:
        """Finish the parameter gathers that an overlapped optimizer step left open, so that the weights are complete.

        Weights that have had no memory since the last update have it again, until the next pass. Collective over the
        ranks of each module.

        Args:
            purpose: the operation that needs the weights, such as `a checkpoint`, for the error.

        Raises:
            OffloadedError: the weights are offloaded.
        """
        self.residency.require(purpose, WEIGHTS)
        if self.restore_weights is not None:
            self.restore_weights()
        self.model.disable_forward_pre_hook()
        self.model.enable_forward_pre_hook()


def params_dtype(config: RunConfig) -> torch.dtype:
    """Return the dtype of parameters and activations that the flags ask for."""
    return torch.bfloat16 if config.model.bf16 else torch.float32


def layer_impl(config: RunConfig, platform: Platform) -> str:
    """Return the layer implementation that the flags ask for on a platform, `transformer_engine` or `local`."""
    if config.model.transformer_impl != "auto":
        return config.model.transformer_impl
    return "transformer_engine" if platform.has_transformer_engine() else "local"


def build_context(config: RunConfig, grids: Grids, module: str, impl: str) -> BuildContext:
    """Return the context from which a provider builds one module of this rank."""
    spec = grids.layout.grids[module]
    stage = spec.coordinates(grids.rank)["pp"]
    parallel_sequence = config.layout.sequence_parallel and module == LANGUAGE
    fuses = impl == "transformer_engine" and not config.train.deterministic_mode
    return BuildContext(
        grid=spec,
        groups=grids.collections[module],
        params_dtype=params_dtype(config),
        transformer_impl=impl,
        sequence_parallel=parallel_sequence,
        recompute=config.model.recompute if module == LANGUAGE else config.model.encoder_recompute,
        recompute_num_layers=config.model.recompute_num_layers if module == LANGUAGE else None,
        recompute_modules=config.model.recomputed_modules(module),
        pre_process=stage == 0,
        post_process=stage == spec.pp - 1,
        seq_length=config.train.seq_length,
        deterministic=config.train.deterministic_mode,
        moe_permute_fusion=config.model.moe_permute_fusion and fuses,
        moe_router_fusion=config.model.moe_router_fusion and fuses,
        moe_token_dispatcher_type=config.model.moe_token_dispatcher_type,
        moe_shared_expert_overlap=config.model.moe_shared_expert_overlap,
        cp_comm_type=config.layout.cp_comm_type,
        fp8=config.model.fp8(module),
    )


def build_model(
    config: RunConfig, provider: ModelProvider, grids: Grids, platform: Platform, watchdog: Watchdog,
    spans: Spans | None = None,
) -> BuiltModel:
    """Build, freeze, cast and wrap the modules of this rank. Collective over each module's ranks.

    The model reports its waits to `watchdog`, and its work to `spans` if they are given.
    """
    if config.model.cuda_graphs:
        platform.leave_default_stream()
    # Replacements of Megatron Core's functions come before any layer is built.
    install_rotary()
    install_padded_routing()
    install_split()
    compat.install_weight_gradients()
    impl = layer_impl(config, platform)
    if impl == "transformer_engine":
        quieten_transformer_engine()
        compat.overwrite_logits()
    logger.info(
        "layers: %s (--transformer-impl %s), parameters in %s",
        impl,
        config.model.transformer_impl,
        "bfloat16" if config.model.bf16 else "float32",
    )
    model = HeteroModel(
        _mimo_config(config, provider, grids, impl),
        grids,
        watchdog,
        spans or Spans(),
        lambda name: _seed(config.train.seed, grids, name, platform),
    )
    chunk = config.model.logits_chunk_size
    if chunk is not None and model.language_model is not None:
        assert isinstance(model.language_model, PaddedVocabulary), type(model.language_model)
        model.language_model.logits_chunk = chunk
    freeze(model, config.model.frozen)
    if impl == "transformer_engine":
        call_norm_kernels(model)
        skip_dropout_generators(model)
    prepare_recomputation(config.model, grids, dict(named_modules_of(model)), impl)
    model.to(platform.device)
    cast_parameters(model, params_dtype(config))
    for name, part in named_modules_of(model):
        # After the cast, because FP8 products check the dtype of the weights.
        fp8 = config.model.fp8(name)
        if fp8 is not None:
            use_fp8(part, fp8, impl)
    trainable, wrapped = _wrap_trainable(config, model, grids, platform)
    if impl == "transformer_engine" and model.language_model is not None:
        choose_grouped_gemm(config.model.moe_gemm, model.language_model, params_dtype(config),
                            deterministic=config.train.deterministic_mode, fp8=config.model.fp8(LANGUAGE),
                            static_rows=config.model.moe_static_rows)
    if config.model.cuda_graphs and model.language_model is not None:
        replay_decoder(model.language_model, grids, platform.device, impl,
                       static_rows=config.model.moe_static_rows)
        model.few_shapes = True
    return BuiltModel(model, wrapped, trainable, params_dtype(config))


def check_shared_attention(config: RunConfig, grid: GridSpec, sizes: TransformerConfig) -> None:
    """Raise ValueError, on every rank, if Transformer Engine's attention cannot split rows over context-parallel ranks.

    Args:
        config: the run.
        grid: grid of the language model.
        sizes: sizes of the language model, which every rank has.
    """
    if grid.cp == 1:
        return
    if not config.model.bf16:
        raise ValueError(f"--llm-cp {grid.cp} with --no-bf16: Transformer Engine has no float32 attention over several "
                         "ranks; use --bf16 or --transformer-impl local")
    if config.layout.cp_comm_type == "a2a":
        check_shared_heads(sizes.num_query_groups or sizes.num_attention_heads, grid.tp, grid.cp)


def _mimo_config(config: RunConfig, provider: ModelProvider, grids: Grids, impl: str) -> MimoModelConfig:
    family = config.model_family
    encoder_specs = {}
    for name in provider.encoders(family) if grids.layout.encoders else ():
        # Megatron Core reads the spec of a module only on the ranks that hold it.
        encoder_specs[name] = ModuleSpec(module=torch.nn.Identity)
        if name in grids.modules:
            encoder_specs[name] = provider.encoder_spec(family, name, build_context(config, grids, name, impl))
    context = build_context(config, grids, LANGUAGE, impl) if LANGUAGE in grids.modules else None
    language = provider.language_spec(family, context)
    # Checked on every rank, so that no rank is left waiting for those of the language grid.
    chunk, kind = config.model.logits_chunk_size, language.module
    if chunk is not None and not (isinstance(kind, type) and issubclass(kind, PaddedVocabulary)):
        raise ValueError(f"--logits-chunk-size {chunk}: --model-provider {config.model.model_provider} builds "
                         f"{kind}, which is not a mimo.model.language.PaddedVocabulary and computes the logits of all "
                         "tokens at once; leave it out")
    if impl == "transformer_engine":
        check_shared_attention(config, grids.layout.language, language.params["config"])
    return MimoModelConfig(
        language_model_spec=language,
        modality_submodules_spec=encoder_specs,
        special_token_ids=provider.special_token_ids(family) if encoder_specs else {},
        module_to_grid_map=dict(grids.grids),
    )


def _seed(seed: int, grids: Grids, module: str, platform: Platform) -> None:
    position = grids.layout.grids[module].coordinates(grids.rank)
    groups = grids.collections[module]
    names = list(grids.layout.grids)
    offset = LANGUAGE_SEED_OFFSET if module == LANGUAGE else ENCODER_SEED_OFFSET * (1 + 10 * names.index(module))
    # Stages hold different layers; the factor is Megatron's.
    platform.seed(
        seed + offset + 100 * position["pp"],
        tp_rank=position["tp"],
        ep_rank=groups.ep.rank(),
        expt_tp_rank=groups.expt_tp.rank(),
    )


def named_modules_of(model: HeteroModel) -> Iterable[tuple[str, Any]]:
    """Yield the modules of this rank by name, encoders first, wrapped or not."""
    yield from model.modality_submodules.items()
    if model.language_model is not None:
        yield LANGUAGE, model.language_model


def freeze(model: HeteroModel, frozen: frozenset[str]) -> None:
    """Stop gradients of the named parts: an encoder's name, `projector` (of every encoder), `language`.

    Frozen parts are put in eval mode; `set_training` keeps them there.
    """
    for name, part in model.modality_submodules.items():
        if name in frozen:
            part.encoders.requires_grad_(False)
        if "projector" in frozen:
            part.input_projections.requires_grad_(False)
    if LANGUAGE in frozen and model.language_model is not None:
        model.language_model.requires_grad_(False)
    set_training(model, True)


def set_training(model: HeteroModel, training: bool) -> None:
    """Put parts that train into training mode and frozen ones into eval mode; without `training` all into eval mode."""
    model.train(training)
    for part in model.modules():
        parameters = list(part.parameters())
        if parameters and not any(parameter.requires_grad for parameter in parameters):
            part.eval()
    language = model.language_model
    if training and language is not None and not any(each.requires_grad for each in language.parameters()):
        recompute_frozen(language)


def cast_parameters(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Cast floating parameters; buffers, such as the router's expert bias, keep their precision."""
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)


def _wrap_trainable(config: RunConfig, model: HeteroModel, grids: Grids, platform: Platform
                    ) -> tuple[dict[str, bool], dict[str, DistributedDataParallel]]:
    """Wrap the modules that train. Returns whether each module trains, and the wrappers of those that do.

    A module has a wrapper on all of its ranks or on none, because its reductions are collective. A pipeline stage may
    have no trained parameter of its own.
    """
    trainable, wrapped = {}, {}
    for name, part in named_modules_of(model):
        count = torch.tensor([sum(parameter.requires_grad for parameter in part.parameters())], device=platform.device)
        dist.all_reduce(count, op=dist.ReduceOp.MAX, group=grids.collections[name].intra_dist_opt)
        trainable[name] = bool(count.item())
    for name, part in list(named_modules_of(model)):
        if trainable[name]:
            wrapped[name] = _wrap(config, part, grids, name)
            if name == LANGUAGE:
                model.language_model = wrapped[name]
            else:
                model.modality_submodules[name] = wrapped[name]
    return trainable, wrapped


def _wrap(config: RunConfig, part: Any, grids: Grids, name: str) -> DistributedDataParallel:
    flags = config.ddp
    overlaps = name == LANGUAGE or flags.encoder_ddp_overlap
    parameters = sum(parameter.numel() for parameter in part.parameters() if parameter.requires_grad)
    bucket_size = flags.ddp_bucket_size
    if flags.ddp_num_buckets is not None:
        bucket_size = max(1, math.ceil(parameters / flags.ddp_num_buckets))
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=flags.grad_reduce_in_fp32,
        overlap_grad_reduce=flags.overlap_grad_reduce and overlaps,
        # A text-only microbatch runs no encoder forward pass whose hooks could finish an overlapped gather.
        overlap_param_gather=flags.overlap_param_gather and name == LANGUAGE,
        use_distributed_optimizer=config.optim.use_distributed_optimizer,
        bucket_size=bucket_size,
        pad_buckets_for_high_nccl_busbw=flags.ddp_pad_buckets_for_high_nccl_busbw,
        check_for_nan_in_grad=False,
        average_in_collective=False,
    )
    wrapped = DistributedDataParallel(part.config, ddp_config, part, pg_collection=grids.collections[name])
    wrapped.broadcast_params()
    accumulate_into_main_grad(wrapped)
    return wrapped
