"""Optimizers of this rank's modules: one each, none where nothing trains, with their own learning rates."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.mimo.optimizer import MimoOptimizer, ModuleOptimizerInfo
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.optimizer.optimizer_config import ParamKey
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from mimo.compat import copy_together, parameter_ranges, storage_key
from mimo.config.optim import OptimConfig
from mimo.config.toml_file import flag_name
from mimo.config.trainer import RunConfig
from mimo.grid.groups import Grids
from mimo.model.build import BuiltModel
from mimo.observability.spans import Kind, Spans
from mimo.protocols import LANGUAGE
from mimo.training.compat import counts_for_norm

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class HeteroOptimizer(MimoOptimizer):
    """Megatron Core's `MimoOptimizer`, which skips non-finite gradients and agrees on a step once, not three times.

    Megatron Core reduces over the world for infinite gradients, for norms and after the update, and it lets a NaN norm
    through. The maximum of a NaN over ranks is undefined, so ranks could disagree. Here norms and the flag travel
    together, and a NaN sets the flag.

    Attributes:
        spans: records where an update waits for other ranks.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.spans = Spans()
        # What `prepare` found: squared norms by module, and whether to skip the step.
        self._prepared: torch.Tensor | None = None

    @torch.no_grad()
    def prepare(self) -> None:
        """Find the gradients of this rank and their norms, for the next `step`.

        This is work of the host, which does not wait for the device: it can run while the device still computes the
        gradients. Call it before anything that waits. Collective over the ranks of each module.
        """
        skip = bool(self.prepare_grads())
        names = sorted(self.module_infos)
        squares = torch.zeros(len(names), dtype=torch.float64, device=torch.cuda.current_device())
        for square, name in zip(squares, names, strict=True):
            info = self.module_infos[name]
            if info.is_active and info.optimizer is not None:
                for norm in gradient_norms(info.optimizer):
                    square += norm.double().square().sum() if isinstance(norm, torch.Tensor) else norm**2
        finite = squares.isfinite()
        skips = ~finite.all() | skip
        self._prepared = torch.cat([squares.where(finite, 0), skips.double().view(1)])

    @torch.no_grad()
    def step(self) -> tuple[bool, float | None, int | None]:
        """Clip by the global norm and update every module, or none. Calls `prepare` unless that has been done.

        Returns:
            Whether parameters were updated, the global gradient norm before clipping (None when skipped), and the
            number of zero gradients (None unless logged). The same on every rank.
        """
        if self._prepared is None:
            self.prepare()
        assert self._prepared is not None
        stats, self._prepared = self._prepared, None
        with self.spans.span(Kind.IDLE, "agreement on norms"):
            dist.all_reduce(stats, op=dist.ReduceOp.MAX)
        *squares, skipped = stats.tolist()
        if skipped:
            return False, None, None
        grad_norm = math.sqrt(sum(squares))
        self._clip(grad_norm)
        num_zeros = self.count_zeros() if self.config.log_num_zeros_in_grad else None
        updated = self.step_with_ready_grads()
        assert updated, "Megatron Core's optimizers for bfloat16 and float32 always update"
        return True, grad_norm, num_zeros

    def inner_optimizers(self) -> Iterator[Any]:
        """Yield the optimizers of Megatron Core that have parameters of this rank: one or several for each module."""
        for info in self.module_infos.values():
            if info.is_active and info.optimizer is not None:
                chained = isinstance(info.optimizer, ChainedOptimizer)
                for one in info.optimizer.chained_optimizers if chained else [info.optimizer]:
                    if one.optimizer is not None:
                        yield one

    @torch.no_grad()
    def write_weights(self) -> None:
        """Write this rank's shards of the model's weights from those in float32; a gather has to follow.

        Needs distributed optimizers.
        """
        for one in self.inner_optimizers():
            one.write_weights()

    def _clip(self, grad_norm: float) -> None:
        # Megatron Core's function collects the gradients one by one before it finds that there is nothing to clip.
        if not 0 < self.config.clip_grad < grad_norm + 1e-6:
            return
        for optimizer in self.inner_optimizers():
            fused = getattr(optimizer, "fused_update", None)
            if fused is not None:
                fused.gradient_scale = self.config.clip_grad / (grad_norm + 1e-6)
            elif parameters := optimizer.get_parameters():
                clip_grad_by_total_norm_fp32(parameters, max_norm=self.config.clip_grad, total_norm=grad_norm,
                                             use_decoupled_grad=reads_decoupled_gradients(optimizer))


def gradient_norms(optimizer: MegatronOptimizer) -> list[Any]:
    """Return norms of a module's gradients, whose squares sum to that of all of them: scalar tensors or numbers.

    Megatron Core's `get_grad_norm` does that sum of a chain on the host. After each norm it waits for the device, which
    then waits for the host to list the gradients of the next one.
    """
    if isinstance(optimizer, ChainedOptimizer) and not optimizer.grads_states_parallel_group_is_shared():
        return [one.get_grad_norm() for one in optimizer.chained_optimizers]
    return [optimizer.get_grad_norm()]


class IndexedDistributedOptimizer(DistributedOptimizer):
    """Distributed optimizer that finds its views of the gradient and parameter buffers once, not in every step.

    Megatron Core's class looks up the shard of every parameter twice a step, filters all of them for the norm, and
    starts one copy kernel for each. With one parameter per expert (2,107 in eight layers of 128 experts) the GPU waits
    for that. The values are the same to the bit. This class requires gradients in DDP's own buffers, as
    `mimo.model.build` sets them up. It has no state except the views, so `adopt` can change the class of an optimizer
    that Megatron Core has built.

    With --fused-optimizer-update, one kernel clips, updates and writes the model's weights (`fused_adam`).

    With --use-precision-aware-optimizer, Adam updates the model's weights themselves, keeps what they lack of float32
    in its state, and reads `decoupled_grad`, whose dtype need not be that of the weights.
    """

    _place: list[tuple[int, int]] | None
    fused_update: Any

    @classmethod
    def adopt(cls, optimizer: MegatronOptimizer, fuse: bool) -> None:
        """Turn the distributed optimizers in `optimizer`, which may be a chain, into instances of this class.

        With `fuse`, those with Transformer Engine's Adam clip, update and write the model's weights in one kernel. Its
        moments must then be float32.
        """
        for each in optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]:
            if type(each) is DistributedOptimizer and not each.is_stub_optimizer:
                each.__class__ = cls
                each._place = None
                each.fused_update = None
                if fuse and type(each.optimizer).__module__.startswith("transformer_engine."):
                    # Triton comes with PyTorch's builds for CUDA, and this package is imported without them, too.
                    from mimo.training.fused_adam import FusedUpdate

                    each.fused_update = FusedUpdate(each.optimizer)
                    # Megatron Core calls the step of the optimizer that it holds.
                    each.optimizer.step = each.fused_update.step

    def _look_up(self) -> None:
        """Find the views, once for the storages of the buffers.

        Memory that is offloaded, or that is there only during updates, comes back in the same storages, and views
        follow it.
        """
        place = [(storage_key(buffer.grad_data), storage_key(buffer.param_data)) for buffer in self.buffers]
        if place == self._place:
            return
        self._place = place
        self._gradients: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._shards: dict[torch.Tensor, torch.Tensor] = {}
        self._gradient_name = "decoupled_grad" if reads_decoupled_gradients(self) else "grad"
        mains = (self.shard_float16_groups if reads_decoupled_gradients(self) else self.shard_fp32_from_float16_groups)
        for model_groups, main_groups in ((self.model_float16_groups, mains),
                                          (self.model_fp32_groups, self.shard_fp32_groups)):
            for model_group, main_group in zip(model_groups, main_groups, strict=True):
                for parameter, main in zip(model_group, main_group, strict=True):
                    self._add_views(parameter, main)
        self._counted = [parameter for parameter in self.get_parameters() if counts_for_norm(self, parameter)]
        if self.fused_update is not None:
            self.fused_update.weights = self._shards

    def _add_views(self, parameter: Any, main: torch.Tensor) -> None:
        held, in_bucket = parameter_ranges(self, parameter)
        assert held.size == in_bucket.size == main.numel()
        self._gradients.append((main, parameter.main_grad.view(-1)[held.start:held.end]))
        buffer, _, bucket = self.model_param_gbuf_map[parameter]
        shard = self.buffers[buffer].buckets[bucket].param_data.view(-1)[in_bucket.start:in_bucket.end]
        # A float32 parameter has no separate master copy, and none has with the precision-aware optimizer.
        if shard.data_ptr() != main.data_ptr():
            self._shards[main] = shard.detach()

    def _copy_model_grads_to_main_grads(self) -> None:
        self._look_up()
        for main, gradient in self._gradients:
            # Without the precision-aware optimizer, a parameter and its gradient have one dtype.
            setattr(main, self._gradient_name, gradient if self._gradient_name != "grad" else gradient.float())
        if self.fused_update is not None:
            # Here and not in the step, before which the host waits for the norm and the device then for the host.
            self.fused_update.find_tensors()

    def get_grads_for_grad_norm(self, grad_norm_group: str | None = None) -> list[torch.Tensor]:
        if grad_norm_group is not None:
            return super().get_grads_for_grad_norm(grad_norm_group)
        self._look_up()
        found = (getattr(parameter, self._gradient_name) for parameter in self._counted)
        return [gradient for gradient in found if gradient is not None]

    def _copy_main_params_to_model_params(self) -> None:
        if self.fused_update is None:  # otherwise its kernel has written them
            self.write_weights()

    def write_weights(self) -> None:
        """Write this rank's shards of the model's weights from those in float32."""
        self._look_up()
        if self._shards:
            copy_together(list(self._shards.values()), list(self._shards))


def reads_decoupled_gradients(optimizer: Any) -> bool:
    """Return whether an optimizer of Megatron Core reads `decoupled_grad` instead of `grad`."""
    return bool(optimizer.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8)


def peak_learning_rates(config: OptimConfig) -> dict[str, float]:
    """Return the peak learning rates of `language`, `encoder` and `projector` parameters."""
    encoder = config.lr if config.encoder_lr is None else config.encoder_lr
    projector = encoder if config.projector_lr is None else config.projector_lr
    return {LANGUAGE: config.lr, "encoder": encoder, "projector": projector}


def build_optimizer(config: OptimConfig, built: BuiltModel, grids: Grids) -> HeteroOptimizer:
    """Build one optimizer for each module that trains.

    Collective over each trained module's ranks. Ranks of a frozen module take no part.
    """
    if config.use_precision_aware_optimizer and find_spec("transformer_engine") is None:
        raise ValueError("--use-precision-aware-optimizer needs Transformer Engine, which is not installed; leave it "
                         "out")
    infos = {}
    for name in grids.layout.grids:
        active = name in grids.modules
        optimizer = None
        if name in built.wrapped:
            optimizer = _build_one(config, built, grids, name)
        infos[name] = ModuleOptimizerInfo(
            optimizer=optimizer, grid=grids.grids[name], pg_collection=grids.collections.get(name), is_active=active
        )
    return HeteroOptimizer(infos, optimizer_config(config, config.lr, built.params_dtype))


def optimizer_config(config: OptimConfig, lr: float, params_dtype: torch.dtype) -> OptimizerConfig:
    """Return Megatron Core's optimizer configuration for a module whose peak learning rate is `lr`."""
    return OptimizerConfig(
        optimizer="adam",
        lr=lr,
        min_lr=config.min_lr * lr / config.lr,
        weight_decay=config.weight_decay,
        adam_beta1=config.adam_beta1,
        adam_beta2=config.adam_beta2,
        adam_eps=config.adam_eps,
        clip_grad=config.clip_grad,
        bf16=params_dtype == torch.bfloat16,
        params_dtype=params_dtype,
        use_distributed_optimizer=config.use_distributed_optimizer,
        log_num_zeros_in_grad=config.log_num_zeros_in_grad,
        use_precision_aware_optimizer=config.use_precision_aware_optimizer,
        main_grads_dtype=DTYPES[config.main_grads_dtype],
        main_params_dtype=DTYPES[config.main_params_dtype],
        exp_avg_dtype=DTYPES[config.exp_avg_dtype],
        exp_avg_sq_dtype=DTYPES[config.exp_avg_sq_dtype],
    )


def _build_one(config: OptimConfig, built: BuiltModel, grids: Grids, name: str) -> Any:
    rates = peak_learning_rates(config)
    module_config = optimizer_config(config, rates[LANGUAGE if name == LANGUAGE else "encoder"], built.params_dtype)
    overrides: dict[ParamKey, Any] = get_standard_config_overrides(module_config)
    if name != LANGUAGE:
        scale = config.min_lr / config.lr
        overrides[ParamKey(name="*input_projections*")] = {
            "max_lr": rates["projector"],
            "min_lr": rates["projector"] * scale,
        }
        if config.encoder_weight_decay is not None:
            decay = config.encoder_weight_decay
            overrides[ParamKey(name="*")] = {"start_wd": decay, "end_wd": decay}
    groups = grids.collections[name]
    with object_gather_within(groups.intra_dist_opt):
        optimizer = get_megatron_optimizer(
            module_config,
            [built.wrapped[name]],
            config_overrides=overrides,
            use_gloo_process_groups=False,
            pg_collection=groups,
        )
    IndexedDistributedOptimizer.adopt(
        optimizer, fuse=config.fused_optimizer_update and not config.use_precision_aware_optimizer)
    return optimizer


@contextmanager
def object_gather_within(default: dist.ProcessGroup) -> Iterator[None]:
    """Context in which `all_gather_object` and `get_world_size` without a group use `default`.

    Megatron Core aligns parameter groups over the world. This would give every module the other modules' groups, and
    would hang when the ranks of a frozen module build no optimizer.
    """
    gather, size = dist.all_gather_object, dist.get_world_size

    def gather_within(object_list: Any, obj: Any, group: Any = None) -> Any:
        return gather(object_list, obj, group=group or default)

    def size_within(group: dist.ProcessGroup | None = None) -> int:
        return size(group or default)

    dist.all_gather_object, dist.get_world_size = gather_within, size_within
    try:
        yield
    finally:
        dist.all_gather_object, dist.get_world_size = gather, size


def build_scheduler(config: RunConfig, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """Build Megatron Core's learning-rate schedule for a validated configuration.

    It counts samples, also for flags in iterations: `step(global_batch_size)` advances it by one iteration.
    """
    flags, train, batch = config.schedule, config.train, config.train.global_batch_size
    if train.train_samples is not None:
        decay = flags.lr_decay_samples or train.train_samples
        warmup, wsd = flags.lr_warmup_samples, flags.lr_wsd_decay_samples
    else:
        assert train.train_iters is not None, "validated"
        decay = (flags.lr_decay_iters or train.train_iters) * batch
        warmup = flags.lr_warmup_iters * batch
        wsd = flags.lr_wsd_decay_iters * batch if flags.lr_wsd_decay_iters is not None else None
    return OptimizerParamScheduler(
        optimizer,
        init_lr=flags.lr_warmup_init,
        max_lr=config.optim.lr,
        min_lr=config.optim.min_lr,
        lr_warmup_steps=warmup,
        lr_decay_steps=decay,
        lr_decay_style=flags.lr_decay_style,
        start_wd=config.optim.weight_decay,
        end_wd=config.optim.weight_decay,
        wd_incr_steps=decay,
        wd_incr_style="constant",
        wsd_decay_steps=wsd,
        lr_wsd_decay_style=flags.lr_wsd_decay_style if flags.lr_decay_style == "WSD" else None,
    )


def current_learning_rates(
    config: RunConfig, scheduler: OptimizerParamScheduler, encoders: tuple[str, ...]
) -> dict[str, float]:
    """Return the learning rates of `language`, each encoder and `projector` at the scheduler's position.

    Frozen parts are left out.
    """
    ratio = config.optim.min_lr / config.optim.lr
    peaks = peak_learning_rates(config.optim)
    parts = {LANGUAGE: peaks[LANGUAGE]}
    if encoders and not config.layout.llm_only:
        parts |= {name: peaks["encoder"] for name in encoders} | {"projector": peaks["projector"]}
    return {
        part: scheduler.get_lr({"max_lr": peak, "min_lr": peak * ratio})
        for part, peak in parts.items()
        if part not in config.model.frozen
    }


def unused_rates(config: RunConfig, encoders: Sequence[str]) -> list[str]:
    """Return a line on each learning rate or weight decay of encoders and projectors that nothing trains with.

    They are no error, because the stages of a recipe share them.
    """
    optim, frozen = config.optim, config.model.frozen
    trains_encoder, trains_projector = not frozen >= set(encoders), "projector" not in frozen
    # The projector's default is the encoders' rate.
    is_used = {"encoder_lr": trains_encoder or (trains_projector and optim.projector_lr is None),
               "projector_lr": trains_projector, "encoder_weight_decay": trains_encoder or trains_projector}
    rates = {name: vars(optim)[name] for name, used in is_used.items() if not used}
    return [f"{flag_name(name)} {rate:g} is not used: the parts that would train with it are frozen (--freeze "
            f"{config.model.freeze})" for name, rate in rates.items() if rate is not None]
