"""Operations that torch counts in a training step of one process, beside those that the trainer says; in a worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from mimo.config.cli import parse
from mimo.config.validate import validate
from mimo.data.batch import Microbatch
from mimo.observability.flops import FlopsCounter
from mimo.protocols import LANGUAGE
from mimo.registry import model_provider
from tests.support import equality, packing

if TYPE_CHECKING:
    from mimo.training.step_metrics import Workload


@dataclass
class Counted:
    """FLOPs of forward and backward passes of one step.

    Attributes:
        torch: by module, as torch's counter saw them.
        hardware: by module, as `FlopsCounter.hardware_flops` says, without convolutions, which torch's does not see.
        model: by module, as `FlopsCounter.model_flops` says.
        text: tokens of each sequence of the batch, padding excluded.
        images: language tokens of each image.
    """

    torch: dict[str, float]
    hardware: dict[str, float]
    model: dict[str, float]
    text: list[int]
    images: list[int]


def count(rank: int, flags: tuple[str, ...], packed: bool = False) -> Counted:
    """Run one step on one process that has all modules, with packed rows of `tests.support.packing` or the flags'."""
    from mimo.model.mtp import begin_mtp_step
    from mimo.training.step import forward_step, run_schedule
    from mimo.training.step_metrics import FlopsMeter, workload

    config = parse(list(flags))
    layout, provider = validate(config, 1), model_provider(config.model.model_provider)
    with equality.open_trainer(config, layout) as parts:
        microbatches = _packed(parts) if packed else _loaded(parts, rank)
        begin_mtp_step(parts.built.model.mtp, microbatches, parts.grids.collections.get(LANGUAGE), torch.device("cpu"))
        with FlopCounterMode(display=False) as counter:
            run_schedule(parts, microbatches, forward_step, forward_only=False)
    meter = FlopsMeter.of(config, provider, layout, impl="local", device_name="")
    assert meter is not None
    work = workload(microbatches, [encoder.name for encoder in layout.encoders])
    seen = FlopsCounter([replace(component, convolution=0.0) for component in meter.counter.components],
                        frozen=config.model.frozen, recompute=config.model.recompute,
                        encoder_recompute=config.model.encoder_recompute, fused=False)
    texts = [batch.text for batch in microbatches if batch.text is not None]
    return Counted(
        _by_module(counter, list(layout.grids)), seen.hardware_flops({LANGUAGE: work.padded, **work.images}),
        meter.figures(work, 1.0)["flops"], [length for text in texts for row in text.lengths for length in row],
        [tokens for text in texts for images in text.image_lengths.values() for tokens in images])


def work_of(rank: int, flags: tuple[str, ...], world_size: int) -> Workload:
    """Return the figures of the global batch that a step of a layout records."""
    from mimo.training.step import train_step

    config = parse(list(flags))
    with equality.open_trainer(config, validate(config, world_size)) as parts:
        return train_step(parts, _loaded(parts, rank)).work


def _by_module(counter: FlopCounterMode, names: Sequence[str]) -> dict[str, float]:
    """The counter's modules; the language model has what no encoder has, for backward passes lose its name at times."""
    counts: Any = counter.get_flop_counts()
    found = {name: float(sum(sum(ops.values()) for key, ops in counts.items()
                             if key == f"HeteroModel.modality_submodules.{name}"))
             for name in names if name != LANGUAGE}
    return found | {LANGUAGE: counter.get_total_flops() - sum(found.values())}


def _packed(parts: Any) -> list[Microbatch]:
    spec = model_provider(parts.config.model.model_provider).token_spec(parts.config.model_family)
    packs = packing.make_samples(spec, ((16, 16), (16, 48), (32, 16), (32, 48)))
    length = parts.config.train.seq_length
    return [packing.microbatch([packing.join(samples)], parts, length) for samples in packs]


def _loaded(parts: Any, rank: int) -> list[Microbatch]:
    loader = equality.make_loader(parts.config, parts.grids.layout, rank)
    try:
        return list(loader.next_step())
    finally:
        loader.close()
