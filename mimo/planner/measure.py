"""Measures the passes of a model on the GPUs of this host, as ratios to the planner's estimates.

The trainer itself runs a few short trainings with two depths of the language model on homogeneous layouts of each
tensor-parallel size. The difference between the depths is the time and the memory of the layers; the rest belongs to
the output layer and the loss.

`measure` starts the ranks with torchrun. They run this file.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, Literal

if __name__ == "__main__":  # torchrun starts it as a file
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mimo import registry
from mimo.config.cli import parse, to_toml
from mimo.config.optim import ScheduleConfig
from mimo.config.trainer import CheckpointConfig, LayoutConfig, ObserveConfig, RunConfig
from mimo.config.validate import num_layers as num_language_layers
from mimo.config.validate import validate, validate_without_data
from mimo.observability.flops import peak_tflops
from mimo.observability.spans import Interval, Kind
from mimo.planner.costs import GIB, Costs, Profile, Ratios
from mimo.planner.gpus import GPUS, Gpu
from mimo.planner.predict import Step
from mimo.planner.shapes import num_layers
from mimo.planner.workload import draw_samples
from mimo.protocols import LANGUAGE, ComparableProvider
from mimo.text import counted

if TYPE_CHECKING:
    import torch.distributed as dist

    from mimo.grid.groups import Grids
    from mimo.platform.base import Platform

# Fewest layers of a training, and how many more the other training of the same layout has.
LEAST_DEPTH, FURTHER_LAYERS = 2, 4
# Steps of each training that are not measured, and steps that are.
WARMUP, STEPS = 3, 3
NUM_MICROBATCHES = 6
# A device is taken not to have waited in a pass if all hosts were at least this far ahead at both ends of it. Waits in
# the middle for which a host makes up later are not seen.
IN_TIME_S = 2e-3
# Passes of whole steps on a GPU take this many times as long as those of these short trainings: 36 layouts with CUDA
# graphs on two and four H200 took 1.01 to 1.08 times as long as predicted without it, with a median of 1.046. The cause
# is probably the power limit. In two such layouts, it lowered the median clock to 1,845 and 1,890 MHz, where 1,980 MHz
# is the highest. It was 1,680 MHz with data parallelism, for which the factor is too small, and 1,965 MHz with tensor
# parallelism without graphs.
SUSTAINED = 1.045
# Memory of a GPU that tensors cannot take. A process with communicators for a pipeline and windows needs about 6 GiB.
OTHER_GIB = 5.5


def measure(config: RunConfig, num_gpus: int, *, device: Literal["cuda", "cpu"] = "cuda") -> Profile:
    """Run the trainings and return the measured profile.

    Args:
        config: the run. Its layout, length and checkpoints are not used.
        num_gpus: GPUs of this host.
        device: `cuda`, or `cpu` to try it out.

    Raises:
        ValueError: the trainer refuses every layout, or the trainings ended with an error. The message has its reason,
            or the end of their output.
    """
    with tempfile.TemporaryDirectory() as folder:
        runs: list[str] = []
        for number, run in enumerate(trainings_of(config, num_gpus, device)):
            path = Path(folder) / f"run-{number}.toml"
            run = replace(run, observe=replace(run.observe, run_dir=str(path.with_suffix(""))))
            path.write_text(to_toml(run), encoding="utf-8")
            runs.append(str(path))
        settings, result = Path(folder) / "settings.json", Path(folder) / "profile.json"
        settings.write_text(json.dumps({"runs": runs, "result": str(result)}), encoding="utf-8")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_gpus),
                   __file__, str(settings)]
        done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
        if done.returncode or not result.exists():
            raise ValueError(f"the measurement ended with exit code {done.returncode}:\n{done.stdout[-3000:]}")
        return Profile.load(result)


def trainings_of(config: RunConfig, num_gpus: int, device: Literal["cuda", "cpu"] = "cuda") -> list[RunConfig]:
    """Return the trainings that `measure` runs, without layouts that the trainer refuses.

    Trainings of one layout that differ in depth are neighbours.

    Raises:
        ValueError: the trainer refuses every layout, or the data set cannot be read.
    """
    def refusal(run: RunConfig) -> str:
        try:
            validate_without_data(run, num_gpus)
        except ValueError as error:
            return str(error)
        return ""

    size = config.train.micro_batch_size
    # Some models have a least number of layers, such as one for each level of an encoder.
    least = next((depth for depth in range(LEAST_DEPTH, num_language_layers(config) + 1)
                  if not refusal(_training(config, 1, num_gpus, size, depth, device))), LEAST_DEPTH)
    # A microbatch has only one packed row.
    (sample,) = draw_samples(config, registry.model_provider(config.model.model_provider), 1)
    found, reason = list[RunConfig](), ""
    for tp in (each for each in (1, 2, 4, 8) if num_gpus % each == 0):
        for samples in (1,) if sample.is_packed else (1, 2):
            pair = [_training(config, tp, num_gpus // tp, size * samples, depth, device)
                    for depth in (least, least + FURTHER_LAYERS)]
            refused = next(filter(None, map(refusal, pair)), "")
            reason = reason or refused
            found += [] if refused else pair
    if not found:
        raise ValueError(f"no layout of {counted(num_gpus, 'GPU')} can be measured; the first one was refused: "
                         f"{reason}")
    return found


def _training(config: RunConfig, tp: int, dp: int, micro_batch_size: int, depth: int,
              device: Literal["cuda", "cpu"]) -> RunConfig:
    """Return a short training of the model with a few layers."""
    provider, family = registry.model_provider(config.model.model_provider), config.model_family
    if isinstance(provider, ComparableProvider):
        family = provider.resolved(family)
    if any(each.name == "num_layers" for each in fields(family)):
        family = replace(family, num_layers=min(depth, family.num_layers))
    text_only = config.layout.llm_only or not provider.encoders(family)
    layout = LayoutConfig(layout="disjoint" if text_only else "homogeneous", llm_only=config.layout.llm_only,
                          llm_tp=tp, llm_dp=dp, sequence_parallel=tp > 1)
    train = replace(config.train, micro_batch_size=micro_batch_size, train_samples=None, train_iters=WARMUP + STEPS,
                    global_batch_size=micro_batch_size * dp * NUM_MICROBATCHES, eval_interval=0, eval_iters=0,
                    num_generations=0, device=device, dry_run=False, world_size=None, encoder_prefetch_depth=0)
    optim = replace(config.optim, min_lr=0.0)
    # Graphs keep memory that the ratios do not know. Without them, times still show what the GPU needs, unless it waits
    # for its host. Every rank has all experts, so none of them exchange rows. All weights have memory all the time, so
    # that the most bytes of a step are those of activations.
    model = replace(config.model, cuda_graphs=False, moe_static_rows=False, fp8_primary_weights=False,
                    recompute="none", recompute_modules="", recompute_num_layers=None, encoder_recompute="none",
                    encoder_recompute_modules="")
    # Ratios refer to rows of --seq-length tokens.
    data = replace(config.data, row_lengths=1)
    return replace(config, train=train, layout=layout, model=model, data=data, model_family=family,
                   optim=optim, schedule=ScheduleConfig(lr_decay_style="constant"), checkpoint=CheckpointConfig(),
                   observe=ObserveConfig(progress=False, log_interval=WARMUP + STEPS))


# Module, kind and microbatch of a pass.
PassKey = tuple[str, str, int]
PASS_KINDS = (Kind.FORWARD, Kind.BACKWARD)


@dataclass(frozen=True)
class MeasuredPass:
    """A pass of one step.

    Attributes:
        seconds: seconds that it took the device.
        lead_s: how far the host was ahead of the device at its start and at its end, the lesser of both.
    """

    seconds: float = 0.0
    lead_s: float = math.inf

    @property
    def is_in_time(self) -> bool:
        return self.lead_s >= IN_TIME_S


@dataclass
class Training:
    """Figures of one training on one rank, in seconds and bytes.

    Attributes:
        passes: median seconds of each module's forward and backward passes, by (module, kind, microbatch). Passes in
            which the GPU waited for a host are left out, unless it did so in all of a module's passes of a kind.
        late: (module, kind) pairs of which every pass had such waits.
        images: tokens of each image, by microbatch.
        others: median seconds of the rest of a step, by kind.
        spread: largest relative difference between the steps in a pass of the language model.
        static_bytes: bytes allocated between steps, on CUDA.
        peak_bytes: most bytes that a step allocates beyond that.
        image_bytes: activations that the encoder keeps for the microbatch with the most patches.
        image_patches: patches of that microbatch.
        host_bound: share of the language model's passes in which the GPU waited for its host, if they are in `late`.
    """

    passes: dict[PassKey, float] = field(default_factory=dict)
    late: set[tuple[str, str]] = field(default_factory=set)
    images: dict[int, list[int]] = field(default_factory=dict)
    others: dict[str, float] = field(default_factory=dict)
    spread: float = 0.0
    static_bytes: float = 0.0
    peak_bytes: float = 0.0
    image_bytes: float = 0.0
    image_patches: float = 0.0
    host_bound: float = 0.0

    def take(self, steps: Sequence[Mapping[PassKey, MeasuredPass]]) -> None:
        """Set `passes`, `late`, `spread` and `host_bound` from the measured steps, which have the same passes."""
        seconds = dict[PassKey, list[float]]()
        for pair in {key[:2] for key in steps[0]}:
            passes = {key: [step[key] for step in steps] for key in steps[0] if key[:2] == pair}
            in_time = {key: [each for each in of if each.is_in_time] for key, of in passes.items()}
            if not any(in_time.values()):
                self.late.add(pair)
                in_time = passes
            seconds |= {key: [each.seconds for each in of] for key, of in in_time.items() if of}
        self.passes = {key: median(of) for key, of in seconds.items()}
        self.spread = max(((max(of) - min(of)) / max(median(of), 1e-9) for (module, *_), of in seconds.items()
                           if module == LANGUAGE), default=0.0)
        language = [(key, each) for step in steps for key, each in step.items() if key[0] == LANGUAGE]
        waited_s = sum(each.seconds for key, each in language if key[:2] in self.late and not each.is_in_time)
        self.host_bound = waited_s / max(sum(each.seconds for _, each in language), 1e-9)

    def of_kind(self, module: str, kind: str) -> dict[int, float]:
        """Return the seconds of a module's passes of one kind, by microbatch."""
        return {number: seconds for (*key, number), seconds in self.passes.items() if key == [module, kind]}


def _run(config: RunConfig, platform: Platform, rank: int, world_size: int) -> Training:
    import torch
    from megatron.core.utils import unwrap_model

    from mimo.grid.groups import Grids
    from mimo.training.loop import TrainingLoop
    from mimo.training.step import train_step

    costs, found = Costs(config, Profile(GPUS["H100"])), Training()

    class Measured(TrainingLoop):
        """A run whose iterations are measured instead of recorded."""

        def _train(self, loader: Any, logger: Any) -> str | None:
            microbatches = loader.next_step()
            steps: list[dict[PassKey, MeasuredPass]] = []
            others: list[dict[str, float]] = []
            for number in range(WARMUP + STEPS):
                self.platform.synchronize()
                if self.platform.name == "cuda":
                    found.static_bytes = float(torch.cuda.memory_allocated())
                self.platform.reset_peak_memory()
                self.parts.spans.begin_step()
                self.watchdog.progress(iteration=number + 1)
                train_step(self.parts, microbatches)
                self.parts.spans.end_step()
                if self.platform.name == "cuda":
                    found.peak_bytes = self.platform.peak_memory_bytes() - found.static_bytes
                intervals = self.parts.spans.intervals()
                if number >= WARMUP:
                    passes, rest = measured_passes(intervals)
                    steps.append(with_least_leads(passes, list(self.grids.layout.grids), self.grids.host))
                    others.append(rest)
                self.session.progress.iteration += 1
            found.take(steps)
            found.others = {kind: median(rest.get(kind, 0.0) for rest in others) for kind in others[0]}
            for encoder in self.grids.layout.encoders:
                self._images(encoder.name, microbatches)
            return "measured"

        def _images(self, name: str, microbatches: Any) -> None:
            """Record each microbatch's images, and the memory of the images of one microbatch."""
            for number, batch in enumerate(microbatches):
                tokens = batch.text.encoded_lengths(name)
                found.images[number] = list(tokens)
                patches = sum(costs.image_patches(name, each) for each in tokens)
                if self.platform.name == "cuda" and patches > found.image_patches:
                    inputs = batch.encoders[name].to(self.platform.device).normalised_inputs()
                    module = unwrap_model(self.parts.built.model.modality_submodules[name])
                    before = torch.cuda.memory_allocated()
                    output = module(encoder_inputs=inputs, hidden_states=None)
                    found.image_bytes, found.image_patches = torch.cuda.memory_allocated() - before, patches
                    del output

    layout = validate(config, world_size, rank)
    with Grids(layout, platform.backend) as grids:
        Measured(config, grids, platform, registry.model_provider(config.model.model_provider),
                 config.find_dataset(config.data.dataset_provider)).run()
    return found


def measured_passes(intervals: Sequence[Interval]) -> tuple[dict[PassKey, MeasuredPass], dict[str, float]]:
    """Return the passes of a step, and the seconds of everything else by kind."""
    passes: dict[PassKey, MeasuredPass] = {}
    rest: dict[str, float] = defaultdict(float)
    lead_s: float | None = None
    for each in intervals:
        label, seconds, before_s, lead_s = each.label, each.end_s - each.begin_s, lead_s, each.lead_s
        if label.kind not in PASS_KINDS or label.microbatch is None:
            rest[str(label.kind)] += seconds
            continue
        key = label.module, str(label.kind), label.microbatch
        known = passes.get(key, MeasuredPass())
        leads = [lead for lead in (before_s, lead_s) if lead is not None]  # none on a CPU
        passes[key] = MeasuredPass(known.seconds + seconds, min((known.lead_s, *leads)))
    return passes, rest


def with_least_leads(passes: Mapping[PassKey, MeasuredPass], modules: Sequence[str], group: dist.ProcessGroup
                     ) -> dict[PassKey, MeasuredPass]:
    """Give every pass the least lead of all ranks of a group on the host, because ranks wait for each other.

    A rank may have no pass of some microbatches, such as those without images.
    """
    import torch
    import torch.distributed as dist

    keys = list(itertools.product(modules, map(str, PASS_KINDS), range(NUM_MICROBATCHES)))
    leads = torch.tensor([passes[key].lead_s if key in passes else math.inf for key in keys])
    dist.all_reduce(leads, dist.ReduceOp.MIN, group=group)
    return {key: replace(passes[key], lead_s=lead) for key, lead in zip(keys, leads.tolist(), strict=True)
            if key in passes}


def _language_ratios(configs: Sequence[RunConfig], trainings: Sequence[Training], profile: Profile) -> Ratios:
    """Return the ratios of one tensor-parallel and micro-batch size, measured by trainings of two depths."""
    config, deep = configs[-1], trainings[-1]
    costs, tp, samples = Costs(config, profile), config.layout.llm_tp, config.train.micro_batch_size
    cost = costs.language(tp, samples)
    depths = [Costs(each, profile).num_layers for each in configs]
    found: dict[str, Any] = {}
    for kind, layer, ends in (("forward", cost.forward_s, cost.ends_forward_s),
                              ("backward", cost.backward_s, cost.ends_backward_s)):
        passes = [(depth, each.of_kind(LANGUAGE, kind)) for depth, each in zip(depths, trainings, strict=True)]
        # The difference between a training whose hosts were late and another one is not the time of the layers.
        passes = [each for each, training in zip(passes, trainings, strict=True)
                  if (LANGUAGE, kind) not in training.late] or passes
        # Microbatches may differ in length, so both depths have the mean of the same ones.
        both = set[int].intersection(*(set(numbers) for _, numbers in passes))
        times = [fmean([seconds for number, seconds in numbers.items() if number in both or not both] or [0.0])
                 for _, numbers in passes]
        found[kind], found[f"ends_{kind}"] = _split([depth for depth, _ in passes], times, layer, ends)
    if deep.peak_bytes:
        images = [each.image_bytes for each in trainings]
        kept = [each.peak_bytes - image for each, image in zip(trainings, images, strict=True)]
        found["bytes"], found["ends_bytes"] = _split(depths, kept, cost.layer_bytes, cost.ends_bytes)
    return replace(Ratios(tp, samples, host_bound=max(each.host_bound for each in trainings)), **found)


def _encoder_ratios(name: str, costs: Costs, tp: int, trainings: Sequence[Training]) -> Ratios:
    """Return the ratios of an encoder with one tensor-parallel size, measured by all trainings that have it."""
    estimated, found = costs.encoder(name, tp), dict[str, Any]()
    for index, kind, call in ((0, "forward", estimated.forward.call_s), (2, "backward", estimated.backward.call_s)):
        in_time = [each for each in trainings if (name, kind) not in each.late]
        points = [(sum(costs.image_s(name, tp, tokens)[index] for tokens in images),
                   training.passes.get((name, kind, number), 0.0))
                  for training in in_time or trainings for number, images in training.images.items()]
        call_s, ratio = _line([point for point in points if min(point) > 0])
        found[kind] = ratio or 1.0
        found[f"ends_{kind}"] = call_s / call if call else 1.0
    most = max(trainings, key=lambda each: each.image_patches)
    if most.image_patches:
        found["bytes"] = most.image_bytes / (most.image_patches * estimated.layer_bytes)
    # Only passes of layers in both directions tell what is outside of them.
    return replace(Ratios(tp, 0, layers=num_layers(costs.shapes[name]) if costs.trains(name) else 0), **found)


def _split(depths: Sequence[int], values: Sequence[float], layer: float, ends: float) -> tuple[float, float]:
    """Split values that grow with the depth into layers and the rest, and return their ratios to the estimates."""
    if depths[0] == depths[-1] or not layer:
        whole = depths[-1] * layer + ends
        ratio = values[-1] / whole if whole else 1.0
        return ratio, ratio
    each = max((values[-1] - values[0]) / (depths[-1] - depths[0]), 0.0)
    rest = max(values[-1] - depths[-1] * each, 0.0)
    return each / layer, rest / ends if ends else 1.0


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Fit y = a + b x with a >= 0 and b > 0 by least squares of the relative error. If all x are similar, a is 0."""
    if not points:
        return 0.0, 0.0
    xs = [x for x, _ in points]
    through_zero = sum(y / x for x, y in points) / len(points)
    if max(xs) < 1.3 * min(xs):
        return 0.0, through_zero
    weights = [1 / (y * y) if y else 0.0 for _, y in points]
    total = sum(weights)
    mean_x = sum(w * x for w, x in zip(weights, xs, strict=True)) / total
    mean_y = sum(w * y for w, (_, y) in zip(weights, points, strict=True)) / total
    above = sum(w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, points, strict=True))
    below = sum(w * (x - mean_x) ** 2 for w, x in zip(weights, xs, strict=True))
    slope = above / below
    constant = mean_y - slope * mean_x
    return (constant, slope) if constant >= 0 and slope > 0 else (0.0, through_zero)


def _profile(configs: Sequence[RunConfig], trainings: Sequence[Training], gpu: Gpu, model: str) -> Profile:
    """Turn all trainings into a profile. Trainings of one layout that differ in depth are neighbours in the list."""
    plain = Profile(gpu)
    if gpu.launches_kernels:
        trainings = [replace(run, passes={key: seconds * (1.0 if key[:2] in run.late else SUSTAINED)
                                          for key, seconds in run.passes.items()}) for run in trainings]
    modules: dict[str, list[Ratios]] = defaultdict(list)
    by_tp: dict[int, list[Training]] = defaultdict(list)
    optimizer, reduction, host, base = [], [], [], []
    for start in range(0, len(configs), 2):
        group, runs = configs[start : start + 2], trainings[start : start + 2]
        modules[LANGUAGE].append(_language_ratios(group, runs, plain))
        by_tp[group[0].layout.llm_tp] += runs
        for config, run in zip(group, runs, strict=True):
            step = Step(config, validate(config, config.layout.llm_tp * config.layout.llm_dp), Costs(config, plain))
            optimizer.append(run.others.get("optimizer", 0.0) / step.optimizer_s())
            if step.reduction_s():
                reduction.append(run.others.get("gradient-sync", 0.0) / step.reduction_s())
            host.append(run.others.get("other", 0.0) + run.others.get("idle", 0.0))
            if run.static_bytes:
                ((_, modules_of_rank),) = step.places()
                state = sum(step.state_bytes(*each) for each in modules_of_rank)
                base.append((run.static_bytes - state) / GIB)
    costs = Costs(configs[0], plain)
    for name, (tp, runs) in itertools.product(costs.encoders, by_tp.items()):
        modules[name].append(_encoder_ratios(name, costs, tp, runs))
    return Profile(gpu, model, modules, optimizer=median(optimizer), reduction=median(reduction) if reduction else 1.0,
                   step_s=median(host), base_gib=max(median(base), 0.0) if base else plain.base_gib,
                   spread=max(run.spread for run in trainings))


def describe_gpu(name: str, memory_gib: float | None) -> Gpu:
    """Return the figures of a GPU by the name that its driver gives it. Unknown GPUs get the links of the H100."""
    known = next((gpu for key, gpu in sorted(GPUS.items(), key=lambda item: -len(item[0])) if key in name.upper()),
                 None)
    gpu = known or replace(GPUS["H100"], tflops=peak_tflops(name) or 1.0, memory_gib=memory_gib or 16.0)
    return replace(gpu, name=name or "CPU", memory_gib=memory_gib or gpu.memory_gib)


def main() -> int:
    """Run as one rank under torchrun; the first one writes the profile."""
    parser = argparse.ArgumentParser(description="One rank of `mimo plan --measure`.")
    parser.add_argument("settings", type=Path, help="JSON file that `measure` writes")
    settings: Mapping[str, Any] = json.loads(parser.parse_args().settings.read_text(encoding="utf-8"))
    sys.path.append(os.getcwd())
    configs = [parse(["--config", path]) for path in settings["runs"]]
    from mimo.training.run import launch

    world_size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])

    def body(_config: RunConfig, _grids: Grids, platform: Platform) -> None:
        import gc

        import torch

        trainings = []
        for config in configs:
            trainings.append(_run(config, platform, rank, world_size))
            gc.collect()
            if platform.name == "cuda":
                torch.cuda.empty_cache()
        if rank == 0:
            memory = None
            if platform.name == "cuda":
                # The driver and NCCL's communicators need some of it.
                memory = torch.cuda.get_device_properties(platform.device).total_memory / GIB - OTHER_GIB
            gpu = describe_gpu(platform.device_name, memory)
            _profile(configs, trainings, gpu, model_name(configs[0])).save(Path(settings["result"]))

    return launch(configs[0], validate(configs[0], world_size, rank), body)


def model_name(config: RunConfig) -> str:
    """Describe the model by the sizes that a profile depends on, for messages."""
    costs = Costs(config, Profile(GPUS["H100"]))
    width = "" if not costs.num_experts else f", {costs.num_experts} experts"
    frozen = f", --freeze {config.model.freeze}" if config.model.freeze else ""
    packed = ", packed patches" if costs.provider.token_spec(config.model_family).packs_patches else ""
    return (f"{config.model.model_provider}, hidden size {costs.hidden_size}{width}{packed}, --seq-length "
            f"{config.train.seq_length}{frozen}")


if __name__ == "__main__":
    sys.exit(main())
