"""Operations that torch counts in a training step of one process, beside those that the trainer says; in a worker."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.utils.flop_counter import FlopCounterMode

from mimo.config.validate import validate
from mimo.observe.flops import FlopsCounter
from mimo.protocols import LANGUAGE, FlopsProvider
from mimo.registry import model_provider
from tests.support import equality


@dataclass
class Counted:
    """FLOPs of one step.

    Attributes:
        torch: by module, as torch's counter saw them.
        hardware: by module, as `FlopsCounter.hardware_flops` says, without convolutions, which torch's does not see.
        model: by module, as `FlopsCounter.model_flops` says.
        sequences: of the language model's batch.
        packed: rows hold several.
    """

    torch: dict[str, float]
    hardware: dict[str, float]
    model: dict[str, float]
    sequences: float
    packed: bool


def count(rank: int, flags: tuple[str, ...]) -> Counted:
    """Run forward and backward passes of one step on one process with both grids on it."""
    from mimo.training.mtp import begin_mtp_step
    from mimo.training.step import forward_step, run_schedule
    from mimo.training.workload import FlopsMeter, workload

    config = equality.parse_config(*flags)
    layout, provider = validate(config, 1), model_provider(config.model.model_provider)
    parts = equality.make_trainer(config, layout)
    loader = equality.make_loader(config, layout, rank)
    try:
        microbatches = loader.next_step()
        begin_mtp_step(parts.built.model.mtp, microbatches, parts.grids.collections.get(LANGUAGE), torch.device("cpu"))
        with FlopCounterMode(display=False) as counter:
            run_schedule(parts, microbatches, forward_step, forward_only=False)
    finally:
        loader.close()
        parts.watchdog.close()
        parts.grids.destroy()
    counts = {name: float(sum(ops.values())) for name, ops in counter.get_flop_counts().items()}
    found = {name: sum(flops for key, flops in counts.items() if key.endswith(suffix))
             for name, suffix in (("vision", "modality_submodules.vision"), (LANGUAGE, "HeteroModel.language_model"))}
    found["all"] = counts["Global"]
    meter = FlopsMeter.of(config, provider, layout, impl="local", device_name="")
    assert meter is not None and isinstance(provider, FlopsProvider)
    work = workload(microbatches, [encoder.name for encoder in layout.encoders])
    figures = meter.figures(work, 1.0)
    seen = FlopsCounter([replace(component, convolution=0.0) for component in meter.counter.components],
                        frozen=config.model.frozen, recompute=config.model.recompute, fused=False)
    hardware = seen.hardware_flops({LANGUAGE: work.padded, **work.images})
    packed = any(batch.text is not None and batch.text.packed is not None for batch in microbatches)
    print(flags, found, hardware, figures, sorted(counts)[:12], flush=True)
    return Counted(found, hardware, figures["flops"], work.text.sequences, packed)
