"""How much a step has to compute: lengths of its sequences and images, and the FLOPs that follow from them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

from mimo.batch import Microbatch, TextBatch
from mimo.config.run import RunConfig
from mimo.grid.spec import Layout
from mimo.observe.flops import NUM_SUMS, FlopsCounter, FlopsProvider, SequenceSums, peak_tflops
from mimo.protocols import LANGUAGE, ModelProvider


@dataclass(frozen=True)
class Workload:
    """Sequences of a step as sums, see `mimo.observe.flops`; those of several lanes add up.

    Attributes:
        text: of the language model, images included and padding excluded.
        padded: of the rows that it computes.
        images: of each encoder, its images, in language tokens.
    """

    text: SequenceSums = field(default_factory=SequenceSums)
    padded: SequenceSums = field(default_factory=SequenceSums)
    images: dict[str, SequenceSums] = field(default_factory=dict)

    def values(self) -> list[float]:
        """As numbers that can be summed over ranks."""
        return [value for sums in (self.text, self.padded, *self.images.values()) for value in astuple(sums)]

    @classmethod
    def from_values(cls, values: Sequence[float], encoders: Sequence[str]) -> Workload:
        """The inverse of `values`, for a run with these encoders."""
        text, padded, *images = (SequenceSums(*values[start:start + NUM_SUMS])
                                 for start in range(0, len(values), NUM_SUMS))
        return cls(text, padded, dict(zip(encoders, images, strict=True)))


def num_values(encoders: Sequence[str]) -> int:
    """How many numbers `Workload.values` gives."""
    return NUM_SUMS * (2 + len(encoders))


def workload(microbatches: Iterable[Microbatch], encoders: Sequence[str]) -> Workload:
    """That of a lane, on a rank that has the language side of its microbatches."""
    text, padded, images = SequenceSums(), SequenceSums(), dict.fromkeys(encoders, SequenceSums())
    for microbatch in microbatches:
        batch = microbatch.text
        assert batch is not None, "language ranks hold text"
        row_length = batch.input_ids.shape[1]
        text += SequenceSums.of(length for row in batch.lengths for length in row)
        padded += SequenceSums.of_rows(_computed(batch, row_length), row_length)
        for name in encoders:
            images[name] += SequenceSums.of(batch.image_lengths.get(name, ()))
    return Workload(text, padded, images)


def _computed(batch: TextBatch, row_length: int) -> list[tuple[int, ...]]:
    """Sequences of each row as attention sees them."""
    if batch.packed is None:
        return [(row_length,)] * len(batch.lengths)
    return [(*row, row_length - sum(row)) if sum(row) < row_length else row for row in batch.lengths]


def _is_outdated(provider: FlopsProvider) -> bool:
    """Whether the provider builds other modules than the class that it has `flop_components` from."""
    classes = type(provider).__mro__

    def depth(name: str) -> int:
        return next((number for number, each in enumerate(classes) if name in vars(each)), 0)

    return depth("flop_components") > min(depth("language_spec"), depth("encoder_spec"))


class FlopsMeter:
    """FLOP/s of steps.

    Args:
        counter: what the model computes.
        world_size: GPUs.
        peak: TFLOP/s that a GPU can reach; None where it is not known.
    """

    def __init__(self, counter: FlopsCounter, world_size: int, peak: float | None) -> None:
        self.counter, self.world_size, self.peak = counter, world_size, peak

    @classmethod
    def of(cls, config: RunConfig, provider: ModelProvider, layout: Layout, *, impl: str,
           device_name: str) -> FlopsMeter | None:
        """The meter of a run; None for a provider that does not say what each of its modules computes.

        Args:
            config: validated flags.
            provider: the model family.
            layout: the grids.
            impl: layer implementation, `transformer_engine` or `local`.
            device_name: name of the GPUs.
        """
        if not isinstance(provider, FlopsProvider) or _is_outdated(provider):
            return None
        components = [component for component in provider.flop_components(config.model_family)
                      if component.module in layout.grids]
        if {component.module for component in components} != set(layout.grids):
            return None
        counter = FlopsCounter(components, frozen=config.model.frozen, recompute=config.model.recompute,
                               fused=impl == "transformer_engine")
        return cls(counter, layout.world_size, config.observe.peak_tflops or peak_tflops(device_name))

    def figures(self, work: Workload, seconds: float) -> dict[str, Any]:
        """Fields of `mimo.observe.metrics.StepRecord` of a step that took `seconds` seconds."""
        needed = self.counter.model_flops({LANGUAGE: work.text, **work.images})
        computed = self.counter.hardware_flops({LANGUAGE: work.padded, **work.images})
        tflops = sum(needed.values()) / seconds / self.world_size / 1e12
        return {"tflops": tflops, "mfu": None if self.peak is None else tflops / self.peak, "flops": needed,
                "hardware_flops": computed}
