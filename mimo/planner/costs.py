"""Costs of the pieces of a step: seconds and bytes of a layer, of an image, of the optimizer. Plain Python.

Everything is first estimated from the model's sizes and the figures of a GPU. A profile, which `mimo.planner.measure`
makes on real GPUs, holds ratios of measured to estimated values. It thus also corrects estimates for depths, images and
numbers of ranks that were not measured.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from mimo import registry
from mimo.config.trainer import RunConfig
from mimo.config.validate import num_layers, resolved_family
from mimo.config.validate_fp8 import MTP
from mimo.grid.dry_run import trained_shapes
from mimo.observability.flops import FlopsCounter, FlopsProvider, SequenceSums
from mimo.planner.gpus import Gpu
from mimo.planner.passes import EncoderCost, LanguageCost, PassCost
from mimo.planner.shapes import (
    embedding_channels,
    is_in,
    kept_channels,
    key_value_channels,
    layers_with_experts,
    mtp_layers,
    multiplies_in_fp8,
    parameters,
    parts_of_layers,
)
from mimo.planner.shapes import num_layers as num_layers_of
from mimo.protocols import LANGUAGE, ModelProvider, ParameterShape

GIB = 2.0**30
# Share of the data sheet's TFLOP/s that dense layers and encoders reach without a profile. On an H200, dense layers
# reach 0.59 with a hidden size of 3,072, and 0.65 to 0.70 with 4,096.
DENSE_EFFICIENCY, ENCODER_EFFICIENCY = 0.64, 0.45
# The same for the layers of a mixture of experts, by --moe-gemm, and the seconds that the host needs for both passes of
# a layer with experts. They come from the runs of docs/performance_experts.md on one H200, with 128 experts in each of
# eight layers. cutlass and separate take longer than packed because they launch kernels for single experts, so the
# difference is proportional to the number of experts on a rank.
EXPERT_EFFICIENCY = {"auto": 0.48, "packed": 0.48, "cutlass": 0.32, "separate": 0.27}
HOST_EXPERTS_S = {"auto": 6.5e-3, "packed": 6.5e-3, "cutlass": 15e-3, "separate": 30e-3}
MEASURED_EXPERTS = 128
# With experts on several ranks, the host also launches their exchange, and a rank waits for the slowest host of all: on
# four H200, eight layers of the same model took 16.2 ms each for both passes of a row of 4,096 tokens. Exchanges reach
# this share of `Gpu.link_gb_s`, waits for other ranks included: 1.6 GB of `alltoall` took 7.7 ms and 1.2 GB of
# `allgather` 5.8 ms.
HOST_EXCHANGE_S, EXCHANGE_SHARE = 6.5e-3, 0.58
# CUDA graphs of these layers contain attention, norms and router, and leave this share of the host's time. With graphs,
# a row takes 10.3 ms a layer with `alltoall` and 7.8 ms with `allgather`, of which transfers are 2.3 and 1.1 ms.
HOST_SHARE_WITH_GRAPHS = 0.54
# How tokens get to their experts with --moe-static-rows. Other values are those of --moe-token-dispatcher-type.
STATIC = "static"
# Every microbatch reads and writes the fp32 gradients of all weights of its layers, and waits for a part of the weights
# of experts. Profiles of kernels on one H200: a microbatch of 4,096 tokens spends 9.3 ms more on the weight gradients
# of 4.8 billion parameters of experts than a fourth of the time for 16,384 tokens, which is 8 bytes at 4 TB/s, and
# 0.7 ms more on each of the other products. With this, passes of a dense model of 3.0 billion parameters take 1.07 to
# 1.09 times the estimate, with rows of 976 tokens as well as with two rows of 4,096.
GRADIENT_GB_S, EXPERT_READ_BYTES = 4000.0, 0.6
# Seconds for each parameter of the embedding and the output layer. Adding their bf16 gradients to fp32 ones in every
# microbatch would take 4e-12: 2.4 and 3.1 ms for 0.62 and 0.79 billion parameters in the same profiles. Without that
# (`mimo.model.vocabulary`), steps of 16 microbatches of these models take 40 and 34 ms less.
ENDS_GRADIENT_S = 0.7e-12
# Tensor-parallel collectives: seconds of each, and the share of `Gpu.link_gb_s` that they reach. Gathers and scatters
# of 2 to 36 MiB between two H200 take 20 us and what 241 GB/s need. In a profiled step, a gather of 9 MB takes 1.4
# times as long (82 us), so both have this factor. With it, a profile has nearly the same ratios for two tensor-parallel
# ranks as for one: they are 2 to 8 % lower.
COLLECTIVE_S, COLLECTIVE_SHARE = 28e-6, 0.48
# Ratios in files of profiles refer to the estimates above, and to the passes that `mimo.planner.measure` counts. A
# change of these needs another number.
PROFILE_VERSION = 6
# Least seconds that the host needs to launch the kernels of a layer's forward pass, and those of its backward pass.
HOST_FORWARD_S, HOST_BACKWARD_S = 0.2e-3, 0.4e-3
# Seconds in which the host launches the passes of a layer (attention and MLP) without CUDA graphs, on one GPU and with
# tensor parallelism, whose layers also launch collectives. On one H200, a step of 28 layers with 16 microbatches of 400
# to 1,500 tokens takes 1,845 ms (docs/precision.md), which is 4.0 ms a layer in both passes together. Short rows with
# tensor parallelism take 5 to 8 ms a layer, whatever their length and the size of the layers; these are the steps of
# docs/when.md without graphs, which ran two at a time. How this divides into passes is an assumption.
LAUNCH_S = {False: (1.4e-3, 2.5e-3), True: (2.3e-3, 4.1e-3)}
# A plan says that the GPU waited for its host if it did so in this share of the measured passes or more.
HOST_BOUND_SHARE = 0.2
# Seconds before the first byte of a collective arrives.
LATENCY_S = 20e-6
# Bytes of memory that Adam reads and writes for a parameter: gradient, master weight, two moments, bf16 weight.
OPTIMIZER_BYTES, MEMORY_GB_S = 34.0, 3000.0
# Further seconds of an optimizer step for each weight of an expert. These are many and small, so the GPU waits for the
# host to launch their kernels.
EXPERT_WEIGHT_S = 20e-6
# Products of dense weights in FP8 are this many times as fast as in bfloat16, the rounding of their operands included.
# On one H200, steps of a dense model of 3.0 billion parameters take 1,955 ms in place of 2,526 with `tensorwise`, and
# 2,214 in place of 2,588 with `blockwise`, and the output layer of another one 63 ms less. Products of experts of 768
# channels gain what rounding costs (docs/performance_experts.md). Encoders have not been measured.
FP8_GAIN = {"tensorwise": 1.45, "blockwise": 1.25}
FP8_COPY_BYTES = 2.0  # for each number, along both axes
# Memory that no formula explains, such as workspaces.
BASE_GIB = 1.0


@dataclass(frozen=True)
class Ratios:
    """Measured over estimated values of one module, with one tensor-parallel size.

    Attributes:
        tp: tensor-parallel size.
        micro_batch_size: samples of a microbatch; 0 for an encoder.
        forward, backward: seconds of the layers' passes.
        ends_forward, ends_backward: seconds of embedding, output layer and loss; for an encoder, seconds of each call.
        bytes: activations that the layers keep.
        ends_bytes: activations that the output layer and the loss keep.
        host_bound: share of the passes in which the GPU waited for its host; 0 unless it did so in all of a kind.
        layers: layers of an encoder; 0 for the language model.
    """

    tp: int = 1
    micro_batch_size: int = 0
    forward: float = 1.0
    backward: float = 1.0
    ends_forward: float = 1.0
    ends_backward: float = 1.0
    bytes: float = 1.0
    ends_bytes: float = 1.0
    host_bound: float = 0.0
    layers: int = 0


@dataclass(frozen=True)
class Profile:
    """Measured ratios, and other figures that no formula gives.

    Attributes:
        gpu: the kind of GPU that it was measured on.
        model: sizes of the model, for messages.
        modules: ratios of each module.
        optimizer: measured over estimated seconds of an optimizer step.
        reduction: measured over estimated seconds of the reduction of gradients.
        step_s: seconds of a step that no pass, reduction or optimizer explains.
        base_gib: memory that no formula explains.
        spread: largest relative difference between repeated measurements of a pass.
        version: `PROFILE_VERSION` of the code that measured it.
    """

    gpu: Gpu
    model: str = ""
    modules: Mapping[str, Sequence[Ratios]] = field(default_factory=dict)
    optimizer: float = 1.0
    reduction: float = 1.0
    step_s: float = 0.0
    base_gib: float = BASE_GIB
    spread: float = 0.0
    version: int = PROFILE_VERSION

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Profile:
        """Read a profile. Raises ValueError, with the path, if the file is not a profile of this version."""
        try:
            values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            version = values.get("version", 1)
            modules = {name: tuple(Ratios(**each) for each in found) for name, found in values.pop("modules").items()}
            profile = cls(gpu=Gpu(**values.pop("gpu")), modules=modules, **values)
        except (OSError, json.JSONDecodeError, TypeError, KeyError, AttributeError) as problem:
            raise ValueError(f"--profile {path}: not a profile of `mimo plan --measure`: {problem}") from None
        if version != PROFILE_VERSION:
            raise ValueError(f"--profile {path}: its costs were measured by version {version} of the planner, and this "
                             f"one is version {PROFILE_VERSION}; measure again with --measure")
        return profile

    def ratios(self, module: str, tp: int, micro_batch_size: int) -> Ratios:
        """Return the measured ratios with the nearest sizes; all are 1 if the module was not measured."""
        def distance(found: Ratios) -> tuple[float, float]:
            return (abs(math.log2(found.tp / tp)),
                    abs(math.log2(max(found.micro_batch_size, 1) / max(micro_batch_size, 1))))

        return min(self.modules.get(module, (Ratios(),)), key=distance)


class Costs:
    """Costs of one model.

    Args:
        config: the run; its layout, its CUDA graphs, its token dispatcher and its static rows are not used.
        profile: measured ratios, or `Profile(gpu)`.

    Raises:
        ValueError: the planner does not support the run (see `check_supported`), or the GPU has no FP8.
    """

    def __init__(self, config: RunConfig, profile: Profile) -> None:
        check_supported(config)
        fp8 = next(filter(None, map(config.model.fp8, (LANGUAGE, *_encoders(config)))), None)
        if fp8 is not None and profile.gpu.launches_kernels and not profile.gpu.multiplies_packed_experts:
            raise ValueError(f"{fp8}: {profile.gpu.name} has no FP8 products; leave the flag out")
        self.config, self.profile, self.gpu = config, profile, profile.gpu
        self.provider: ModelProvider = registry.model_provider(config.model.model_provider)
        family = config.model_family
        self.encoders = _encoders(config)
        modules = (*self.encoders, LANGUAGE)
        described: Any = self.provider
        self.counter = FlopsCounter([each for each in described.flop_components(family) if each.module in modules],
                                    frozen=config.model.frozen,
                                    logits_again=config.model.logits_chunk_size is not None)
        self.shapes: dict[str, list[ParameterShape]] = {
            module: self.provider.parameter_shapes(family, module) for module in modules}
        self.hidden_size = self.provider.hidden_size(family)
        self.num_layers = max(num_layers(config), 1)
        self.num_experts = self.provider.num_experts(family)
        self._frozen = config.model.frozen
        # Layouts ask for the same costs again and again.
        for compute in (self.language, self.encoder, self.image_s, self.image_flops, self.image_patches):
            setattr(self, compute.__name__, cache(compute))
        # Number of experts that each token is sent to, if the provider has such a field.
        self.top_k = int(vars(resolved_family(config)).get("moe_router_topk") or 1) if self.num_experts else 1

    def language(self, tp: int, micro_batch_size: int, ep: int = 1, cp: int = 1, length: int | None = None,
                 *, graphs: float = 0.0, exchange: str = "alltoall", splits_rows: bool = True) -> LanguageCost:
        """Return the costs of a microbatch of the language model on a context-parallel rank.

        Its rows have `length` tokens; None: --seq-length. `graphs` is the share of microbatches whose layers have CUDA
        graphs. `exchange` is the dispatcher of tokens, or `STATIC`. `splits_rows` is whether tensor-parallel ranks have
        sequence parallelism.
        """
        if 0 < graphs < 1:
            plain, replayed = (self.language(tp, micro_batch_size, ep, cp, length, graphs=each, exchange=exchange,
                                             splits_rows=splits_rows) for each in (0.0, 1.0))
            return replace(plain, forward_s=plain.forward_s + graphs * (replayed.forward_s - plain.forward_s),
                           backward_s=plain.backward_s + graphs * (replayed.backward_s - plain.backward_s),
                           launch_s=((1 - graphs) * plain.launch_s[0], (1 - graphs) * plain.launch_s[1]))
        length = length or self.config.train.seq_length
        tokens = micro_batch_size * length / cp
        layer_s, ends_s, mtp_s = self._passes_s(
            tp, micro_batch_size, ep, cp, length, graphs=graphs > 0, exchange=exchange)
        ratios = self.profile.ratios(LANGUAGE, tp, micro_batch_size)
        if graphs:
            # Where the GPU waited for its host, its own time is not known, and the estimate counts.
            late = ratios.host_bound
            ratios = replace(ratios, forward=(1 - late) * ratios.forward + late * min(ratios.forward, 1.0),
                             backward=(1 - late) * ratios.backward + late * min(ratios.backward, 1.0))
        part = self._parts_of_layers / self.num_layers / 2 if self.gpu.launches_kernels else 0.0
        launch_s = LAUNCH_S[tp > 1][0] * part, LAUNCH_S[tp > 1][1] * part if layer_s[1] else 0.0
        # With --moe-static-rows, the experts of a rank have room for all tokens of all ranks.
        room = ep * min(self.top_k, self.num_experts / ep) / self.top_k if exchange == STATIC else 1.0
        ways = tp if splits_rows else 1
        whole_bytes, split_bytes = self._kept_bytes(LANGUAGE, self.hidden_size, room)
        kept = tokens * (whole_bytes / ways + split_bytes / tp) / self.num_layers
        vocabulary = max((shape.shape[0] for shape in self.shapes[LANGUAGE] if shape.stage != "layer"), default=0)
        chunk = self.config.model.logits_chunk_size
        # Every depth of multi-token prediction has logits of its own.
        heads = 1 if chunk else sum(each.makes_logits for each in self.counter.components)
        logits = heads * min(tokens, chunk or tokens) * vocabulary / tp
        # The gradient of the output layer is summed over the chunks, see `mimo.grid.dry_run.logits_lines`.
        summed = 8.0 * vocabulary * self.hidden_size / tp if chunk is not None and layer_s[1] else 0.0
        return LanguageCost(
            layer_s[0] * ratios.forward, layer_s[1] * ratios.backward,
            (ends_s[0] + mtp_s[0]) * ratios.ends_forward, (ends_s[1] + mtp_s[1]) * ratios.ends_backward,
            kept * ratios.bytes, tokens * self.hidden_size * self.number_bytes / ways,
            (2 * self.number_bytes + FP8_COPY_BYTES * self._logits_in_fp8) * logits * ratios.ends_bytes + summed,
            tokens * sum(each / split for each, split in zip(self._mtp_bytes(room), (ways, tp), strict=True)),
            (0.0, 0.0) if graphs else launch_s, mtp_s[0] * ratios.ends_forward,
            # No graph contains multi-token prediction.
            (self._mtp_layers * launch_s[0], self._mtp_layers * launch_s[1]))

    def _passes_s(self, tp: int, micro_batch_size: int, ep: int, cp: int, length: int, *, graphs: bool, exchange: str
                  ) -> tuple[tuple[float, float], tuple[float, float], tuple[float, float]]:
        """Estimate the seconds of the passes of a layer, of output layer and loss, and of multi-token prediction.

        Those of a layer are the mean over the layers. `graphs` says whether layers are replayed from CUDA graphs;
        `language` explains `exchange`.
        """
        sums = SequenceSums.of_rows([[length]] * micro_batch_size, length)
        layers, ends, mtp = [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]
        for component, forward, backward in self.counter.passes(LANGUAGE, sums):
            # Context-parallel ranks share the work of each row evenly.
            into = (mtp if component.name.startswith("mtp ") else layers) if component.recomputed else ends
            into[0] += forward / cp
            into[1] += backward / cp
        for each in (layers, mtp):
            each[1] += each[0] * self._repeated_share(LANGUAGE) if each[1] else 0.0
        if layers[0]:
            faster = 1 - micro_batch_size * length / cp * self._flops_saved_by_fp8(LANGUAGE) / layers[0]
            layers, mtp = [each * faster for each in layers], [each * faster for each in mtp]
        ends_s = [each / (self.gpu.tflops * 1e12 * tp * DENSE_EFFICIENCY)
                  / (self._fp8_gain(LANGUAGE) if self._logits_in_fp8 else 1.0) for each in ends]
        moved_s = self._moved_s(tp, ep, cp, micro_batch_size * length / cp, exchange != "alltoall")
        layer_s, mtp_s = (
            self._layers_s(flops, shapes, count, tp, ep, moved_s,
                           self._host_s(ep, graphs=replayed, whole=ep == 1 or exchange == STATIC))
            for flops, shapes, count, replayed in (
                (layers, self.shapes[LANGUAGE], self.num_layers, graphs),
                (mtp, mtp_layers(self.shapes[LANGUAGE]), self._mtp_layers, False)))
        if self.trains(LANGUAGE):
            others = parameters(self.shapes[LANGUAGE], layers=False) - parameters(
                mtp_layers(self.shapes[LANGUAGE]), layers=True)
            ends_s[1] += others / tp * ENDS_GRADIENT_S
        return (layer_s[0] / self.num_layers, layer_s[1] / self.num_layers), (ends_s[0], ends_s[1]), mtp_s

    def _layers_s(self, flops: Sequence[float], shapes: Sequence[ParameterShape], count: float, tp: int, ep: int,
                  moved_s: tuple[float, float, float], host_s: tuple[float, float]) -> tuple[float, float]:
        """Estimate the seconds of the passes of `count` layers.

        Args:
            flops: FLOPs of both passes.
            shapes: parameters of the layers; others do not count.
            count: number of layers.
            tp: tensor-parallel ranks.
            ep: ranks that divide the experts.
            moved_s: what `_moved_s` returns of one layer.
            host_s: what `_host_s` returns of one layer.
        """
        rate = self.gpu.tflops * 1e12 * tp * (
            EXPERT_EFFICIENCY[self.config.model.moe_gemm] if self.num_experts else DENSE_EFFICIENCY)
        dense, experts = (parameters(shapes, layers=True, experts=each) for each in (False, True))
        moved, dispatch, shared = (count * each for each in moved_s)
        read = experts / ep * EXPERT_READ_BYTES / (GRADIENT_GB_S * 1e9)
        forward_s = max(flops[0] / rate + read, count * host_s[0]) + 2 * moved + dispatch + shared
        backward_s = flops[1] / rate + read
        if self.trains(LANGUAGE):
            floats = 4 if self.config.ddp.grad_reduce_in_fp32 or not self.config.model.bf16 else 2
            backward_s += (dense / tp + experts / ep) * 2 * floats / (GRADIENT_GB_S * 1e9)
        backward_s = max(backward_s, count * host_s[1]) + 3 * moved + dispatch + 2 * shared
        return forward_s, backward_s if flops[1] else 0.0

    def _host_s(self, ep: int, *, graphs: bool, whole: bool) -> tuple[float, float]:
        """Return the least seconds that the host needs for the passes of a layer, the mean over the layers.

        `whole` says whether graphs contain whole layers.
        """
        if graphs and whole:
            return 0.0, 0.0
        if not self.num_experts:
            return HOST_FORWARD_S, HOST_BACKWARD_S
        least, local = HOST_EXPERTS_S["packed"], self.num_experts / ep
        host_s = least + (HOST_EXPERTS_S[self.config.model.moe_gemm] - least) * min(local / MEASURED_EXPERTS, 1)
        host_s += HOST_EXCHANGE_S if ep > 1 else 0.0
        # Some layers may have no experts. A backward pass launches about twice as much as a forward pass.
        host_s *= self._layers_with_experts / self.num_layers / 3
        share = HOST_SHARE_WITH_GRAPHS if graphs else 1.0
        return share * (HOST_FORWARD_S + host_s), share * (HOST_BACKWARD_S + 2 * host_s)

    def _moved_s(self, tp: int, ep: int, cp: int, tokens: float, gathers: bool) -> tuple[float, float, float]:
        """Return the seconds of a layer's transfers of the tokens of a rank, the mean over the layers.

        Returns:
            Half of the tensor-parallel collectives of a forward pass, those of experts (`gathers`: with the dispatcher
            `allgather`), and those of keys and values.
        """
        # With sequence parallelism, a layer gathers its input and scatters its output around attention, and around its
        # MLP; layers of hybrid models have only one of them.
        sent = tokens * self.hidden_size * 2 * (tp - 1) / tp
        moved = (COLLECTIVE_S + sent / self._collective_bytes_s) * self._parts_of_layers / self.num_layers
        # In both passes, tokens go to the ranks of their experts and come back: a copy for each expert, which is sorted
        # by it before and after the experts, or one copy for every rank, which returns a sum. What goes to other nodes
        # takes the network.
        rows, inside = tokens / tp * self._expert_size, min(ep, self.gpu.gpus_per_node)
        there_and_back = 2 + self.gathered_sum_bytes
        peer, local = (rows * there_and_back, rows * ep * there_and_back) if gathers else (
            rows * self.top_k * 2 * 2 / ep, rows * self.top_k * 2 * 2 * 2)
        dispatch = self._layers_with_experts / self.num_layers * (
            peer * (inside - 1) / (EXCHANGE_SHARE * self.gpu.link_gb_s * 1e9)
            + peer * (ep - inside) / (self.gpu.network_gb_s * 1e9) + local / (GRADIENT_GB_S * 1e9) + 2 * LATENCY_S)
        # Each rank gets the keys and values of the other context-parallel ranks once in the forward pass, and again
        # with their gradients in the backward pass. No measurement has corrected this estimate yet: rings hide a part
        # of it behind attention, and transfers to other nodes take longer. Latent attention unfolds keys and values,
        # and counts as if they were as wide as the hidden states.
        channels = key_value_channels(self.shapes[LANGUAGE]) or 2.0 * self.hidden_size * self.num_layers
        sent = tokens * 2 * channels / self.num_layers / tp
        shared = (cp - 1) * (sent / (self.gpu.link_gb_s * 1e9) + LATENCY_S)
        return moved if tp > 1 else 0.0, dispatch if ep > 1 else 0.0, shared

    @property
    def gathered_sum_bytes(self) -> int:
        """Bytes of each number that a rank returns with the dispatcher `allgather`."""
        return 2 if self.config.model.moe_gemm in ("auto", "packed") else 4

    @property
    def _collective_bytes_s(self) -> float:
        """Bytes that a rank sends in a second of a tensor-parallel collective."""
        return COLLECTIVE_SHARE * self.gpu.link_gb_s * 1e9

    @property
    def _layers_with_experts(self) -> float:
        return layers_with_experts(self.shapes[LANGUAGE], self.num_experts)

    @property
    def number_bytes(self) -> float:
        """Bytes of a number in the run's precision."""
        return 2.0 if self.config.model.bf16 else 4.0

    @property
    def _expert_size(self) -> int:
        """Width of the tokens that go to experts, which is smaller than the hidden size with --moe-latent-size."""
        return next((shape.shape[1] for shape in self.shapes[LANGUAGE]
                     if shape.name == "mlp.experts.linear_fc1.weight"), self.hidden_size)

    @property
    def _mtp_layers(self) -> float:
        """Layers of multi-token prediction, of all depths, as a number of mean layers of the decoder."""
        parts = parts_of_layers(mtp_layers(self.shapes[LANGUAGE]), self.hidden_size, self.num_experts)
        return parts * self.num_layers / self._parts_of_layers if parts else 0.0

    @property
    def _parts_of_layers(self) -> float:
        return parts_of_layers(self.shapes[LANGUAGE], self.hidden_size, self.num_experts)

    def encoder(self, name: str, tp: int) -> EncoderCost:
        """Return the costs of an encoder's passes."""
        ratios, shapes = self.profile.ratios(name, tp, 0), self.shapes[name]
        layers = num_layers_of(shapes)
        width = min((min(shape.shape) for shape in shapes if len(shape.shape) == 2 and shape.stage == "layer"),
                    default=self.hidden_size)

        def estimated(tp: int) -> tuple[float, float]:
            """Return the seconds of a FLOP and of a patch: each pass of a layer sums the hidden states up twice."""
            return (1 / (self.gpu.tflops * 1e12 * ENCODER_EFFICIENCY * tp),
                    layers * 2 * 2 * (tp - 1) / tp * 2.0 * width / self._collective_bytes_s)

        (flop_s, patch_s), (flop_s_there, patch_s_there) = estimated(tp), estimated(ratios.tp)
        # Products take less time in FP8, in proportion to the number of patches.
        patch_s -= flop_s * self._flops_saved_by_fp8(name)
        sums_s = 2 * COLLECTIVE_S if tp > 1 else 0.0
        # Layers do the same products in both passes. What makes the forward pass slower than that in a profile is
        # outside of them: patches are embedded and features projected. Recomputation does not repeat this, and neither
        # more layers nor more tensor-parallel ranks change it.
        inside = min(ratios.forward, ratios.backward) if ratios.layers else ratios.forward
        outside = (ratios.forward - inside) * ratios.layers / layers
        again = PassCost(layers * (HOST_FORWARD_S + sums_s) * ratios.ends_forward, inside * flop_s, inside * patch_s)
        whole, split = self._kept_bytes(name, width)
        return EncoderCost(
            replace(again, flop_s=again.flop_s + outside * flop_s_there,
                    patch_s=again.patch_s + outside * patch_s_there), again,
            PassCost(layers * (HOST_BACKWARD_S + sums_s) * ratios.ends_backward, ratios.backward * flop_s,
                     ratios.backward * (patch_s - flop_s * self._flops_saved_by_fp8(name))),
            (whole + split / tp) * ratios.bytes, self.number_bytes * width * layers)

    def encoder_launch_s(self, name: str, tp: int) -> tuple[float, float]:
        """Return the seconds in which the host launches the layers of an encoder's forward and backward pass."""
        layers = num_layers_of(self.shapes[name]) if self.gpu.launches_kernels else 0
        return layers * LAUNCH_S[tp > 1][0], layers * LAUNCH_S[tp > 1][1] * self.trains(name)

    def image_s(self, name: str, tp: int, tokens: int) -> tuple[float, float, float]:
        """Return the seconds of an image's forward pass, of its layers only, and of its backward pass.

        They leave out what each call takes besides. `tokens` are the rows of the encoder's output.
        """
        cost, (forward, backward) = self.encoder(name, tp), self.image_flops(name, tokens)
        patches = self.image_patches(name, tokens)
        return (cost.forward.image_s(forward, patches), cost.again.image_s(forward, patches),
                cost.backward.image_s(backward, patches) if backward else 0.0)

    def image_flops(self, name: str, tokens: int) -> tuple[float, float]:
        """Return the FLOPs of the forward and backward pass of an image with so many rows of the encoder's output."""
        found = self.counter.passes(name, SequenceSums.of([tokens]))
        again = self._repeated_share(name) if self.trains(name) else 0.0
        return (sum(forward for _, forward, _ in found),
                sum(backward + (again * forward if each.recomputed else 0.0) for each, forward, backward in found))

    def image_patches(self, name: str, tokens: int) -> float:
        """Return the length of an image's sequence in the encoder's layers."""
        return max((component.tokens_per_token * tokens + component.extra_tokens
                    for component in self.counter.components if component.module == name), default=float(tokens))

    def projector_bytes(self, name: str) -> tuple[float, float]:
        """Return the bytes that an encoder's projectors keep for one patch if they train, and those of its features.

        Products keep their inputs and outputs, except for features: the rows for the language model, of all levels.
        """
        last = [shape for shape in self.shapes[name] if shape.stage == "last" and len(shape.shape) == 2]
        kept = sum(shape.count * (max(shape.shape) + (shape.shape[1] if shape.shape[0] != self.hidden_size else 0))
                   for shape in last)
        width = sum(shape.count for shape in last if shape.shape[0] == self.hidden_size) * self.hidden_size
        patches = max((each.tokens_per_token for each in self.counter.components if each.module == name), default=1.0)
        return (self.number_bytes * kept / patches if "projector" not in self._frozen else 0.0,
                self.number_bytes * (width or self.hidden_size) / patches)

    def outside_bytes(self, name: str) -> float:
        """Return the bytes that an encoder that trains keeps for one patch outside of its layers."""
        return self.number_bytes * embedding_channels(self.shapes[name]) + self.projector_bytes(name)[0]

    def trains(self, module: str) -> bool:
        """Return whether the module's own weights train. A projector may train while its encoder does not."""
        return module not in self._frozen

    def trained(self, module: str) -> list[ParameterShape]:
        """Return the parameters of a module that train, those of its projector included."""
        return trained_shapes(self.config, module, self.shapes[module])

    def optimizer_s(self, parameters: float, expert_weights: float = 0.0) -> float:
        """Return the seconds of an optimizer step on a rank.

        It updates `parameters` parameters, among them `expert_weights` weight matrices of experts.
        """
        seconds = parameters * OPTIMIZER_BYTES / (MEMORY_GB_S * 1e9) + expert_weights * EXPERT_WEIGHT_S
        return seconds * self.profile.optimizer

    def reduction_s(self, parameters: float, replicas: int, gpus: int) -> float:
        """Return the seconds of reducing gradients and gathering parameters, without overlap.

        Args:
            parameters: number of parameters of a rank.
            replicas: number of ranks that have the same ones.
            gpus: number of GPUs over which these ranks are spread. If a node has fewer, the network is the bottleneck.
        """
        if replicas <= 1:
            return 0.0
        bandwidth = self.gpu.link_gb_s if gpus <= self.gpu.gpus_per_node else self.gpu.network_gb_s
        gradients = 4 if self.config.ddp.grad_reduce_in_fp32 or not self.config.model.bf16 else 2
        moved = parameters * (gradients + (2 if self.config.model.bf16 else 4)) * (replicas - 1) / replicas
        return moved / (bandwidth * 1e9) * self.profile.reduction

    def _repeated_share(self, module: str) -> float:
        """Return the share of the FLOPs of a module's forward passes that selective recomputation repeats."""
        parts, whole, again = self.config.model.recomputed_modules(module), 0.0, 0.0
        for shape in self.shapes[module]:
            if shape.stage == "layer" and len(shape.shape) == 2:
                flops = 2.0 * self._uses(shape) * math.prod(shape.shape)
                whole += flops
                again += flops if is_in(shape, parts) else 0.0
        return again / whole if whole else 0.0

    @property
    def _logits_in_fp8(self) -> bool:
        fp8 = self.config.model.fp8(LANGUAGE)
        return fp8 is not None and fp8.output_proj

    def _fp8_gain(self, module: str) -> float:
        fp8 = self.config.model.fp8(module)
        return 1.0 if fp8 is None else FP8_GAIN[fp8.recipe]

    def _flops_saved_by_fp8(self, module: str) -> float:
        """Return how many bf16 FLOPs of a token's forward pass take as long as FP8 makes its layers faster."""
        return (1 - 1 / self._fp8_gain(module)) * sum(
            2.0 * shape.count * math.prod(shape.shape) for shape in self.shapes[module]
            if shape.stage == "layer" and multiplies_in_fp8(shape) and shape.split != "expert")

    def fp8_copies(self, module: str) -> list[ParameterShape]:
        """Return the weights of a module of which each step keeps FP8 copies. Frozen ones are copied in every pass."""
        if self.config.model.fp8(module) is None or not self.trains(module):
            return []
        shapes = self.shapes[module]
        output = max((shape for shape in shapes if shape.stage in ("last", "ends")), default=None,
                     key=lambda shape: (shape.shape[0], shape.stage == "last"))
        return [shape for shape in shapes
                if multiplies_in_fp8(shape) or (shape is output and module == LANGUAGE and self._logits_in_fp8)]

    def _uses(self, shape: ParameterShape) -> float:
        """Return how many times a token is multiplied by matrices of a kind, in all layers."""
        return shape.count * (self.top_k / self.num_experts if shape.split == "expert" else 1)

    def _kept_bytes(self, module: str, width: int, expert_room: float = 1.0) -> tuple[float, float]:
        """Return the bytes that all layers of a module keep for one token; `kept_channels` says what they are.

        The activations of experts have room for `expert_room` times their rows.
        """
        layers = self.num_layers if module == LANGUAGE else num_layers_of(self.shapes[module])
        return self._bytes_of_layers(self.shapes[module], layers, width, module, expert_room)

    def _mtp_bytes(self, expert_room: float) -> tuple[float, float]:
        """Return the bytes of `_kept_bytes` for multi-token prediction: its layers, and the projections before them."""
        layers = mtp_layers(self.shapes[LANGUAGE])
        if not layers:
            return 0.0, 0.0
        projections = [shape for shape in self.shapes[LANGUAGE] if shape.name == f"{MTP}eh_proj.weight"]
        count = parts_of_layers(layers, self.hidden_size, self.num_experts)
        shapes = [*layers, *(replace(shape, stage="layer") for shape in projections)]
        return self._bytes_of_layers(shapes, count, self.hidden_size, LANGUAGE, expert_room)

    def _bytes_of_layers(self, shapes: Sequence[ParameterShape], layers: float, width: int, module: str,
                         expert_room: float) -> tuple[float, float]:
        """Return the numbers of `kept_channels` in bytes of the run's precision."""
        experts = expert_room * self.top_k / self.num_experts if self.num_experts else 0.0
        whole, split = kept_channels(shapes, layers, width, self.config.model.recomputed_modules(module), experts)
        return self.number_bytes * whole, self.number_bytes * split


def check_supported(config: RunConfig) -> None:
    """Raise ValueError if the planner cannot predict a run on any layout."""
    name, encoders = config.model.model_provider, _encoders(config)
    provider: Any = registry.model_provider(name)
    if not isinstance(provider, FlopsProvider):
        raise ValueError(f"mimo plan does not support --model-provider {name}: it does not list the FLOPs of its model "
                         "(flop_components)")
    if len(encoders) > 1:
        raise ValueError(f"mimo plan does not support models with several encoders ({', '.join(encoders)})")


def _encoders(config: RunConfig) -> tuple[str, ...]:
    provider = registry.model_provider(config.model.model_provider)
    return () if config.layout.llm_only else provider.encoders(config.model_family)
