"""How much a step has to compute: lengths of its sequences and images, and the FLOPs that follow from them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.transformer_config import TransformerConfig

from mimo.config.trainer import RunConfig
from mimo.data.batch import Microbatch, TextBatch
from mimo.grid.groups import Grids
from mimo.grid.spec import Layout
from mimo.observability.flops import NUM_SUMS, FlopsCounter, FlopsProvider, SequenceSums, peak_tflops
from mimo.platform.base import Platform
from mimo.protocols import LANGUAGE, ModelProvider


@dataclass(frozen=True)
class Workload:
    """Sequences of a step as sums, see `mimo.observability.flops`; those of several lanes add up.

    Attributes:
        text: of the language model, images included and padding excluded.
        padded: of the rows that it computes.
        images: of each encoder, its images, in language tokens.
    """

    text: SequenceSums = field(default_factory=SequenceSums)
    padded: SequenceSums = field(default_factory=SequenceSums)
    images: dict[str, SequenceSums] = field(default_factory=dict)

    def values(self) -> list[float]:
        """Flatten to numbers that can be summed over ranks."""
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
        """Fields of `mimo.observability.metrics.StepRecord` of a step that took `seconds` seconds."""
        needed = self.counter.model_flops({LANGUAGE: work.text, **work.images})
        computed = self.counter.hardware_flops({LANGUAGE: work.padded, **work.images})
        tflops = sum(needed.values()) / seconds / self.world_size / 1e12
        return {"tflops": tflops, "mfu": None if self.peak is None else tflops / self.peak, "flops": needed,
                "hardware_flops": computed}


# How evenly encoder work is spread over lanes.


def image_tokens(microbatches: Sequence[Microbatch]) -> tuple[list[float], list[float]]:
    """Image tokens of this rank's lane in each microbatch, and those it would have had without balanced packing.

    Zero on ranks without text.
    """
    texts = [batch.text for batch in microbatches]
    held = [0.0 if text is None else float(sum(map(sum, text.token_counts.values()))) for text in texts]
    return held, [0.0 if text is None else float(text.unbalanced_image_tokens) for text in texts]


def imbalance(largest: Sequence[float], total: float, num_lanes: int) -> float | None:
    """Image tokens of the fullest lane over the mean of all lanes, over a step; None without images.

    Args:
        largest: of each microbatch, the image tokens of the lane that has most.
        total: image tokens of all lanes and microbatches.
        num_lanes: number of lanes.
    """
    return sum(largest) * num_lanes / total if total else None


# Memory of the ranks of each module.


def peak_memory_bytes(grids: Grids, platform: Platform) -> dict[str, int]:
    """By module, the highest memory that any of its ranks has had, the same on every rank. Collective over the world.

    Args:
        grids: process groups.
        platform: whose high-water mark is read.
    """
    names, own = list(grids.layout.grids), platform.peak_memory_bytes()
    peaks = torch.tensor([own if name in grids.modules else 0 for name in names], dtype=torch.int64)
    dist.all_reduce(peaks, op=dist.ReduceOp.MAX, group=grids.host)
    return dict(zip(names, peaks.tolist(), strict=True))


# MoE auxiliary losses of a step, averaged over MoE layers, microbatches and lanes.
#
# Megatron Core's router records each layer's loss in a tracker; Megatron Core's report of it falls back to
# `parallel_state` for the data-parallel group and averages with an operation gloo does not have, so the reduction is
# here.


# Megatron Core's names of the losses that routers record, by --moe-router-load-balancing-type.
TRACKED = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}
# Losses whose gradient depends on the layout -> the tokens that are balanced together, the flags that decide it.
LAYOUT_DEPENDENT = {
    "aux_loss": ("the tokens of each microbatch", "--micro-batch-size and, where that is above 1, on --llm-dp"),
    "global_aux_loss": ("all lanes and the microbatches of the step so far", "--micro-batch-size and --llm-dp"),
}


def layout_note(config: TransformerConfig, *, in_rl: bool = False) -> str | None:
    """Return a line for the log if the load-balancing loss makes router gradients depend on the layout, else None.

    Args:
        config: Megatron's configuration of the language model.
        in_rl: routers take the completions of a microbatch, packed into one row, for one sequence.
    """
    kind = config.moe_router_load_balancing_type
    if not config.num_moe_experts or not config.moe_aux_loss_coeff or kind not in TRACKED:
        return None
    tokens, flags = LAYOUT_DEPENDENT.get(kind, LAYOUT_DEPENDENT["aux_loss"])
    if in_rl:
        flags, instead = "--max-tokens-per-microbatch and --llm-dp", "--moe-aux-loss-coeff 0 leaves the loss out"
    elif kind in LAYOUT_DEPENDENT:
        instead = "those of seq_aux_loss are the same in every layout"
    else:
        return None
    return (f"--moe-router-load-balancing-type {kind} balances the load of {tokens}, so router gradients depend on "
            f"{flags}; {instead}")


class MoeLosses:
    """Reads the recorded losses of a run, step by step. Made collectively by the language grid's pipeline stages.

    Args:
        model: of this rank.
        groups: the language grid's process groups; None on a rank that has no part of it, which reads nothing.
        device: where the model is.
        per_layer: also give the losses of each layer.
    """

    def __init__(self, model: Any, groups: ProcessGroupCollection | None, device: torch.device, *,
                 per_layer: bool) -> None:
        self._groups, self._per_layer, self._config = groups, per_layer, model.config
        self._num_moe_layers = 0 if groups is None else count_moe_layers(model.language_model, groups, device)

    def take(self, num_microbatches: int) -> dict[str, float]:
        """Losses of the forward passes since the last call, empty without experts. Collective over it."""
        if self._groups is None or not self._num_moe_layers:
            return {}
        config, kinds = self._config, self._config.moe_router_load_balancing_type
        names = tuple(TRACKED[kind] for kind in ([kinds] if isinstance(kinds, str) else kinds) if kind in TRACKED)
        return moe_losses(
            self._groups, num_layers=config.num_layers + (config.mtp_num_layers or 0),
            num_moe_layers=self._num_moe_layers, num_microbatches=num_microbatches, names=names,
            per_layer=self._per_layer)


def count_moe_layers(language_model: torch.nn.Module, groups: ProcessGroupCollection, device: torch.device) -> int:
    """MoE layers of the whole language model: layers of other kinds do not count in the mean."""
    count = torch.tensor([sum(isinstance(part, MoELayer) for part in language_model.modules())], device=device)
    dist.all_reduce(count, group=groups.pp)
    return int(count.item())


def moe_losses(
    groups: ProcessGroupCollection,
    *,
    num_layers: int,
    num_moe_layers: int,
    num_microbatches: int,
    names: tuple[str, ...],
    per_layer: bool,
) -> dict[str, float]:
    """Read and clear the recorded losses. Collective over the language grid's pp, tp and dp groups.

    Args:
        groups: the language grid's process groups.
        num_layers: entries: decoder layers of the whole model, dense ones included, and then one a depth of multi-token
            prediction, for all its layers.
        num_moe_layers: layers with experts.
        num_microbatches: forward passes since the last call.
        names: tracker names to read; the same on every rank.
        per_layer: also give `moe/<name>_layer_<i>`.
    """
    tracker = get_moe_metrics_tracker()
    losses: dict[str, float] = {}
    for name in names:
        tracker.ensure_initialized(name, num_layers, device=torch.cuda.current_device())
        values = tracker.metrics[name].values.clone()
        dist.all_reduce(values, group=groups.pp)
        # Each rank recorded its part. The tracker knows of whose sum only on stages that have a router.
        dist.all_reduce(values, group=groups.tp_dp_cp if name == TRACKED["global_aux_loss"] else groups.tp_cp)
        dist.all_reduce(values, group=groups.dp_cp)
        layers = (values / (groups.dp_cp.size() * num_microbatches)).tolist()
        losses[name] = sum(layers) / max(num_moe_layers, 1)
        if per_layer:
            losses |= {f"moe/{name}_layer_{index}": value for index, value in enumerate(layers)}
    tracker.clear()
    return losses
