"""Learning-rate schedule: the wheel's, counted in samples so that iterations and samples are one thing."""

from __future__ import annotations

from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from mimo.config.run import RunConfig
from mimo.optim.build import peak_learning_rates
from mimo.protocols import LANGUAGE


def build_scheduler(config: RunConfig, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """The schedule of a validated configuration. `step(global_batch_size)` advances it by one iteration."""
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
    """Learning rate of `language`, each encoder and `projector` at the scheduler's position.

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
