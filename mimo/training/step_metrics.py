"""Figures of a step: its work and FLOPs, the balance of encoder work, memory, and MoE losses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.transformer_config import TransformerConfig

from mimo.config.trainer import RunConfig
from mimo.config.validate import layers_of_stages
from mimo.data.batch import Microbatch
from mimo.grid.groups import Grids
from mimo.grid.spec import Layout
from mimo.observability.flops import NUM_SUMS, FlopsCounter, FlopsProvider, Recompute, SequenceSums, peak_tflops
from mimo.platform.base import Platform
from mimo.protocols import LANGUAGE, ModelProvider


@dataclass(frozen=True)
class Workload:
    """Sequences of a step as sums, see `mimo.observability.flops`. The sums of several lanes can be added.

    Attributes:
        text: sequences of the language model, images included and padding excluded.
        padded: rows that the language model computes, padding included.
        images: images of each encoder, in language tokens.
    """

    text: SequenceSums = field(default_factory=SequenceSums)
    padded: SequenceSums = field(default_factory=SequenceSums)
    images: dict[str, SequenceSums] = field(default_factory=dict)

    def values(self) -> list[float]:
        """Flatten to numbers that can be summed over ranks."""
        return [value for sums in (self.text, self.padded, *self.images.values()) for value in astuple(sums)]

    @classmethod
    def from_values(cls, values: Sequence[float], encoders: Sequence[str]) -> Workload:
        """Build a workload from the numbers of `values`, for a run with these encoders."""
        text, padded, *images = (SequenceSums(*values[start:start + NUM_SUMS])
                                 for start in range(0, len(values), NUM_SUMS))
        return cls(text, padded, dict(zip(encoders, images, strict=True)))


def num_values(encoders: Sequence[str]) -> int:
    """Count the numbers that `Workload.values` returns."""
    return NUM_SUMS * (2 + len(encoders))


def workload(microbatches: Iterable[Microbatch], encoders: Sequence[str]) -> Workload:
    """Compute the workload of a lane, on a rank that has the language side of its microbatches."""
    text, padded, images = SequenceSums(), SequenceSums(), dict.fromkeys(encoders, SequenceSums())
    for microbatch in microbatches:
        batch = microbatch.text
        assert batch is not None, "language ranks hold text"
        row_length = batch.input_ids.shape[1]
        text += SequenceSums.of(length for row in batch.lengths for length in row)
        # Attention sees a row as one sequence, or as packed ones with the padding as the last of them.
        rows: Sequence[Sequence[int]] = [(row_length,)] * len(batch.lengths)
        if batch.packed is not None:
            rows = [batch.packed.cu_seqlens.diff().tolist()]
        padded += SequenceSums.of_rows(rows, row_length)
        for name in encoders:
            images[name] += SequenceSums.of(batch.encoded_lengths(name))
    return Workload(text, padded, images)


def _is_outdated(provider: FlopsProvider) -> bool:
    """Return whether a provider inherits FLOPs of modules that it replaces, which are wrong for its own.

    That is so if its class overrides `language_spec` or `encoder_spec` of a base class, and not `flop_components`. A
    base class may have FLOPs for modules that each of its subclasses builds, as long as it builds none itself.
    """
    classes = type(provider).__mro__

    def places(name: str) -> list[int]:
        return [number for number, each in enumerate(classes) if name in vars(each)]

    said = min(places("flop_components"))
    built = map(places, ("language_spec", "encoder_spec"))
    return any(len(found) > 1 and min(found) < said for found in built)


def _counted(config: RunConfig, module: str) -> Recompute:
    """Return the recomputation whose FLOPs are counted; of the parts of --recompute-modules, those of core_attn."""
    how = config.model.recompute if module == LANGUAGE else config.model.encoder_recompute
    return "none" if how == "selective" and "core_attn" not in config.model.recomputed_modules(module) else how


class FlopsMeter:
    """FLOP/s of steps.

    `copies` says how many ranks of a module compute the same; 1 where it is left out.
    """

    def __init__(self, counter: FlopsCounter, world_size: int, peak: float | None,
                 copies: Mapping[str, int] | None = None) -> None:
        self.counter, self.world_size, self.peak, self.copies = counter, world_size, peak, copies or {}

    @classmethod
    def of(cls, config: RunConfig, provider: ModelProvider, layout: Layout, *, impl: str,
           device_name: str) -> FlopsMeter | None:
        """Build the meter of a run, or return None if the provider does not say what each of its modules computes."""
        if not isinstance(provider, FlopsProvider) or _is_outdated(provider):
            return None
        components = [component for component in provider.flop_components(config.model_family)
                      if component.module in layout.grids]
        if {component.module for component in components} != set(layout.grids):
            return None
        # The share of the language model's layers that --recompute full computes again.
        again, layers = config.model.recompute_num_layers, layers_of_stages(config, layout)
        share = 1.0 if again is None else sum(min(again, count) for count in layers) / sum(layers)
        counter = FlopsCounter(components, frozen=config.model.frozen, recompute=_counted(config, LANGUAGE),
                               recomputed_share=share,
                               encoder_recompute=_counted(config, "encoder"),
                               logits_again=config.model.logits_chunk_size is not None,
                               fused=impl == "transformer_engine")
        return cls(counter, layout.world_size, config.observe.peak_tflops or peak_tflops(device_name),
                   # In a homogeneous layout every context-parallel rank encodes all images of its lane.
                   {grid.name: grid.cp for grid in layout.encoders})

    def figures(self, work: Workload, seconds: float) -> dict[str, Any]:
        """Compute fields of `mimo.observability.metrics.StepRecord` for a step that took `seconds` seconds."""
        needed = self.counter.model_flops({LANGUAGE: work.text, **work.images})
        computed = {name: flops * self.copies.get(name, 1) for name, flops in
                    self.counter.hardware_flops({LANGUAGE: work.padded, **work.images}).items()}
        tflops = sum(needed.values()) / seconds / self.world_size / 1e12
        return {"tflops": tflops, "mfu": None if self.peak is None else tflops / self.peak, "flops": needed,
                "hardware_flops": computed}

    def policy_figures(self, lengths: Iterable[int], num_forward: int, seconds: float) -> dict[str, float]:
        """Compute the trainer's speed in an iteration of reinforcement learning, for a model without encoders.

        Args:
            lengths: tokens of each sequence that is trained on, once each.
            num_forward: forward passes of all sequences besides, which give log-probs.
            seconds: seconds of these passes and of the updates.
        """
        sums = {LANGUAGE: SequenceSums.of(lengths)}
        flops = sum(self.counter.model_flops(sums).values()) + num_forward * self.counter.forward_flops(sums)
        tflops = flops / seconds / self.world_size / 1e12
        return {"tflops": tflops} if self.peak is None else {"tflops": tflops, "mfu": tflops / self.peak}


def encoded_tokens(microbatches: Sequence[Microbatch]) -> tuple[list[float], list[float]]:
    """Count the tokens of this lane's images in the encoders' layers, by microbatch, with and without balanced packing.

    Both are zero on ranks without text.
    """
    texts = [batch.text for batch in microbatches]
    held = [0.0 if text is None else float(sum(sum(text.encoded_lengths(name)) for name in text.token_counts))
            for text in texts]
    return held, [0.0 if text is None else float(text.unbalanced_encoded_tokens) for text in texts]


def imbalance(largest: Sequence[float], total: float, num_lanes: int) -> float | None:
    """Divide the encoded tokens of the fullest lane by the mean over lanes, for a step; None without images.

    `largest` has the most encoded tokens of any lane, by microbatch; `total` counts those of all lanes.
    """
    return sum(largest) * num_lanes / total if total else None


def peak_memory_bytes(grids: Grids, platform: Platform) -> dict[str, int]:
    """Return, by module, the highest memory that any of its ranks has had. Collective over the world."""
    names, own = list(grids.layout.grids), platform.peak_memory_bytes()
    peaks = torch.tensor([own if name in grids.modules else 0 for name in names], dtype=torch.int64)
    dist.all_reduce(peaks, op=dist.ReduceOp.MAX, group=grids.host)
    return dict(zip(names, peaks.tolist(), strict=True))


# MoE auxiliary losses of a step, averaged over MoE layers, microbatches and lanes.
#
# Megatron Core's router records each layer's loss in a tracker. Its own report of them takes the data-parallel group
# from `parallel_state` and averages with an operation that gloo does not have, so the reduction is done here.


# Megatron Core's names of the losses that routers record, by --moe-router-load-balancing-type.
TRACKED = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}
# Losses whose gradient depends on the layout -> the tokens that are balanced together, and the flags that decide them.
LAYOUT_DEPENDENT = {
    "aux_loss": ("the tokens of each microbatch", "--micro-batch-size and, where that is above 1, on --llm-dp"),
    "global_aux_loss": ("all lanes and the microbatches of the step so far", "--micro-batch-size and --llm-dp"),
}


def layout_note(config: TransformerConfig, *, in_rl: bool = False) -> str | None:
    """Return a line for the log if the load-balancing loss makes router gradients depend on the layout, else None.

    In RL, completions of a microbatch are packed into one row, which routers take for one sequence.
    """
    kinds = config.moe_router_load_balancing_type  # one, or several in a provider's own configuration
    kind = next((each for each in ([kinds] if isinstance(kinds, str) else kinds) if each in TRACKED), None)
    if not config.num_moe_experts or not config.moe_aux_loss_coeff or kind is None:
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
    """Reads the recorded losses of a run, step by step. Its constructor is collective over pipeline stages.

    Ranks outside of the language grid have no groups, and read nothing.
    """

    def __init__(self, model: Any, groups: ProcessGroupCollection | None, device: torch.device, *,
                 per_layer: bool) -> None:
        self._groups, self._per_layer, self._config = groups, per_layer, model.config
        # Losses are averaged over the MoE layers of the whole language model.
        self._num_moe_layers = 0
        if groups is not None:
            count = torch.tensor([sum(isinstance(part, MoELayer) for part in model.language_model.modules())],
                                 device=device)
            dist.all_reduce(count, group=groups.pp)
            self._num_moe_layers = int(count.item())

    def take(self, num_microbatches: int) -> dict[str, float]:
        """Read and clear the losses of the forward passes since the last call; empty without experts.

        Collective over the language grid's pp, tp and dp groups.

        Returns:
            Losses by Megatron Core's names; with `per_layer` also `moe/<name>_layer_<i>`.
        """
        groups, config = self._groups, self._config
        if groups is None or not self._num_moe_layers:
            return {}
        kinds = config.moe_router_load_balancing_type
        tracker = get_moe_metrics_tracker()
        losses: dict[str, float] = {}
        for kind in [kinds] if isinstance(kinds, str) else kinds:
            if kind not in TRACKED:
                continue
            name = TRACKED[kind]
            # The tracker has an entry for each decoder layer, dense ones included, and for each depth of multi-token
            # prediction. Every rank reads the same names, those without experts too.
            tracker.ensure_initialized(name, config.num_layers + (config.mtp_num_layers or 0),
                                       device=torch.cuda.current_device())
            values = tracker.metrics[name].values.clone()
            dist.all_reduce(values, group=groups.pp)
            # Each rank recorded its part. The tracker knows which ranks to sum over only on stages that have a router.
            dist.all_reduce(values, group=groups.tp_dp_cp if kind == "global_aux_loss" else groups.tp_cp)
            dist.all_reduce(values, group=groups.dp_cp)
            layers = (values / (groups.dp_cp.size() * num_microbatches)).tolist()
            losses[name] = sum(layers) / max(self._num_moe_layers, 1)
            if self._per_layer:
                losses |= {f"moe/{name}_layer_{index}": value for index, value in enumerate(layers)}
        tracker.clear()
        return losses
