"""`mimo plan`: predict every layout of a run, print the best ones, and say whether separate grids are worth it."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from mimo import registry
from mimo.commands.flags import PlanFlags
from mimo.config.checks import refuse, refuse_below
from mimo.config.cli import parse, to_toml
from mimo.config.trainer import LayoutConfig, RunConfig
from mimo.config.validate import validate
from mimo.grid.layout import required_world_size
from mimo.planner.candidates import HOMOGENEOUS, TEXT, Candidate, Search
from mimo.planner.costs import GIB, HOST_BOUND_SHARE, Costs, Profile, check_supported
from mimo.planner.gpus import GPUS
from mimo.planner.measure import measure, model_name
from mimo.planner.workload import SampleSize, draw_samples
from mimo.protocols import LANGUAGE, SizesProvider
from mimo.text import counted, table

# Predicted step times that differ by less are not told apart.
ERROR = 0.05
# Samples that are read at most. A layout of many lanes needs those of some of its lanes only.
MAX_SAMPLES = 4096

# Sections of run_config.toml, and flags of them, that all layouts of a plan share, and those that make a layout. None:
# all flags of the section.
RUN_SECTIONS: Mapping[str, Sequence[str] | None] = {
    "train": ("global-batch-size", "seq-length"), "model-family": None,
    "data": ("dataset-provider", "microbatch-order", "row-lengths"), "dataset": None,
    "optim": ("use-distributed-optimizer", "use-precision-aware-optimizer", "exp-avg-dtype", "exp-avg-sq-dtype"),
    "ddp": ("grad-reduce-in-fp32", "overlap-grad-reduce", "encoder-ddp-overlap")}
LAYOUT_SECTIONS: Mapping[str, Sequence[str] | None] = {
    "layout": None, "model": None, "train": ("micro-batch-size", "encoder-prefetch-depth")}


def plan(flags: PlanFlags, run_flags: list[str]) -> int:
    """Run the command.

    Returns:
        0, or 1 if no layout fits.

    Raises:
        ValueError: flags that contradict each other, a data set that cannot be read, or a model whose cost is unknown.
    """
    config = _config(flags, run_flags)
    refuse(config.layout.llm_expt_tp > 1, f"mimo plan does not support --llm-expt-tp {config.layout.llm_expt_tp}: what "
           "ranks exchange then has not been measured; leave it out")
    profile = _profile(flags, config)
    size = flags.gpus or flags.nodes * profile.gpu.gpus_per_node
    costs = Costs(config, profile)
    samples = draw_samples(config, costs.provider,
                           min(flags.plan_steps * config.train.global_batch_size, MAX_SAMPLES))
    search = Search(config, costs, samples, size, 2 * flags.top)
    own = _own(config, search)
    found = search.run()
    if not found and not search.large and own is None:
        cp = config.layout.llm_cp
        why = search.refusal or f"--llm-cp {cp} leaves no grid of {counted(size, 'GPU')} to the language model"
        raise ValueError(f"no layout of {counted(size, 'GPU')} works; the last one was refused: {why}")
    document = json.dumps({
        "gpus": size, "profile": asdict(profile), "run": _sections(config, RUN_SECTIONS),
        "layouts": [_record(each) for each in [*found, *search.others]], "own": None if own is None else _record(own)})
    if flags.out:
        Path(flags.out).write_text(document + "\n", encoding="utf-8")
    if flags.json:
        print(document)
        return 0 if found and found[0].fits else 1
    what = "images" if costs.provider.token_spec(config.model_family).tiles is None else "tiles of images"
    for line in _head(config, profile, size, samples, what, measured=bool(flags.profile or flags.measure)):
        print(line)
    needed = required_world_size(config.layout, search.encoders)
    if own is None and needed != size and _has_layout(config):
        print(f"The grids of the run's own flags need {counted(needed, 'GPU')}, so they are not predicted. Layouts "
              "here have the flags in their rows.\n")
    for line in _table(found, flags.top, own):
        print(line)
    for line in _advice(found, search):
        print(line)
    return 0 if found and found[0].fits else 1


def _config(flags: PlanFlags, run_flags: list[str]) -> RunConfig:
    refuse_below(flags, {"gpus": 0, "nodes": 0, "plan_steps": 1, "top": 1})
    refuse(bool(flags.gpus) == bool(flags.nodes), f"--gpus {flags.gpus} and --nodes {flags.nodes}: give one of them")
    refuse(bool(flags.profile and flags.measure),
           f"--profile {flags.profile} and --measure {flags.measure}: give one of them")
    refuse(flags.gpu_memory_gib is not None and not flags.gpu_memory_gib > 0,
           f"--gpu-memory-gib {flags.gpu_memory_gib} is not above 0")
    for name, path in (("--out", flags.out), ("--measure", flags.measure)):
        folder = Path(path).absolute().parent
        refuse(bool(path) and not folder.is_dir(), f"{name} {path}: there is no folder {folder}")
    config = parse(run_flags)
    refuse_below(config.train, {"micro_batch_size": 1, "global_batch_size": 1})
    provider = registry.model_provider(config.model.model_provider)
    if isinstance(provider, SizesProvider):
        provider.validate_sizes(config.model_family)
    check_supported(config)
    # The run has no length here, and its own layout need not fit the number of GPUs.
    return replace(config, train=replace(config.train, dry_run=True, world_size=None))


def _profile(flags: PlanFlags, config: RunConfig) -> Profile:
    if flags.profile:
        profile = Profile.load(Path(flags.profile))
    elif flags.measure:
        import torch  # only to count GPUs

        gpus = torch.cuda.device_count()
        if not gpus:
            raise ValueError(f"--measure {flags.measure}: this host has no GPU; leave it out, or give a --profile")
        profile = measure(config, gpus)
        profile.save(Path(flags.measure))
    else:
        profile = Profile(GPUS[flags.gpu])
    if flags.gpu_memory_gib is not None:
        profile = replace(profile, gpu=replace(profile.gpu, memory_gib=flags.gpu_memory_gib))
    return profile


def _own(config: RunConfig, search: Search) -> Candidate | None:
    """Predict the layout of the run's own flags, if they give one and it has the right size.

    Raises:
        ValueError: the trainer refuses it.
    """
    if config.layout in (LayoutConfig(), LayoutConfig(llm_only=True)):
        return None
    if required_world_size(config.layout, search.encoders) != search.size:
        return None
    return search.candidate("yours", config, validate(config, search.size))


def _has_layout(config: RunConfig) -> bool:
    """Return whether the run's flags say more of a layout than what all layouts of a plan have from them."""
    default = LayoutConfig()
    return replace(config.layout, llm_only=False, llm_cp=default.llm_cp, cp_comm_type=default.cp_comm_type) != default


def _head(config: RunConfig, profile: Profile, size: int, samples: list[SampleSize], what: str, *,
          measured: bool) -> list[str]:
    counts = [len(sample.images) for sample in samples]
    mean = fmean(counts)
    tokens = fmean(sample.num_tokens for sample in samples)
    images = ""
    if mean:
        images = f"{mean:.1f} {what} each (coefficient of variation {pstdev(counts) / mean:.2f}), "
    lines = [f"{counted(size, 'GPU')}: {profile.gpu.name}, {profile.gpu.memory_gib:.0f} GiB each; "
             f"--global-batch-size {config.train.global_batch_size}",
             f"data: {len(samples)} samples, {images}{tokens:,.0f} tokens of {config.train.seq_length:,}"]
    if measured:
        lines.append(f"costs: measured on {profile.gpu.name} with {profile.model}; passes repeat within "
                     f"{profile.spread:.0%}")
        if profile.model != model_name(config):
            lines.append(f"  this run is another model ({model_name(config)}), so that they are less certain")
        if any(each.host_bound > HOST_BOUND_SHARE for each in profile.modules.get(LANGUAGE, ())):
            lines.append("  the GPU waited for its host, so what it gains by --cuda-graphs is an estimate")
    else:
        lines.append("costs: estimated from the data sheet; --measure on such GPUs makes them more certain")
        if not config.model.bf16:
            lines.append("  this is the speed of bfloat16, and products in float32 (--no-bf16) take several times as "
                         "long")
    if config.model.transformer_impl == "local":
        lines.append("  attention is taken as fused, and --transformer-impl local needs more memory and time for long "
                     "rows")
    return [*lines, ""]


def _table(found: list[Candidate], top: int, own: Candidate | None) -> list[str]:
    shown = found[:top]
    # The best of each kind is always there.
    for kind in dict.fromkeys(each.kind for each in found):
        if all(each.kind != kind for each in shown):
            shown.append(next(each for each in found if each.kind == kind))
    if own is not None:
        shown.append(own)
    rows = [["layout", "step, s", "bound, s", "tokens/s per GPU", "memory, GiB", "waiting", "flags"]]
    for each in shown:
        prediction = each.prediction
        waiting = prediction.parts_s.get("waiting", 0.0) / prediction.step_s
        rows.append([each.kind, f"{prediction.step_s:.3g}", f"{prediction.bound_s:.3g}",
                     f"{prediction.tokens_per_s:,.0f}",
                     f"{prediction.memory_gib:.1f}" + ("" if each.fits else " (too much)"),
                     f"{waiting:.0%}", each.flags])
    widths = table([row[:-1] for row in rows])
    return [f"{line:<{max(map(len, widths))}}  {row[-1]}" for line, row in zip(widths, rows, strict=True)]


def _advice(found: list[Candidate], search: Search) -> list[str]:
    slow = f", {search.slow} left out because they cannot be among the best" if search.slow else ""
    lines = ["", f"{len(found)} layouts predicted, {search.refused} refused by the trainer's rules{slow}"]
    fitting = [each for each in found if each.fits]
    if not fitting:
        given = [f"{flag} {value}" for flag, value in (("--recompute", search.base.model.recompute),
                                                       ("--encoder-recompute", search.base.model.encoder_recompute))
                 if value != "none"]
        what = (f" with {' '.join(given)}: leave {'this flag' if len(given) == 1 else 'these flags'} out, so that the "
                "planner chooses what is recomputed, or use" if given else ", even if all layers are recomputed: use")
        return [*lines, f"None fits into {search.costs.gpu.usable_bytes / GIB:.0f} GiB{what} more GPUs"]
    best = fitting[0]
    parts = sorted(best.prediction.parts_s.items(), key=lambda item: -item[1])
    spent = ", ".join(f"{name} {seconds / best.prediction.step_s:.0%}" for name, seconds in parts
                      if seconds >= 0.005 * best.prediction.step_s)
    lines += [f"best: {best.flags}", f"  its time: {spent}; its fullest rank: {best.prediction.fullest}"]
    if best.kind == TEXT:
        return lines
    together = next((each for each in fitting if each.kind == HOMOGENEOUS), None)
    apart = next((each for each in fitting if each.kind != HOMOGENEOUS), None)
    if together is None or apart is None:
        return [*lines, f"Only {'separate grids fit' if together is None else 'homogeneous layouts fit'}."]
    gain = together.prediction.step_s / apart.prediction.step_s
    if gain > 1 + ERROR:
        lines.append(f"Separate grids pay: {gain:.2f} times the best homogeneous layout.")
    elif gain < 1:
        lines.append(f"Separate grids are not worth it: {gain:.2f} times the best homogeneous layout.")
    else:
        lines.append(f"Separate grids make little difference: {gain:.2f} times the best homogeneous layout, within the "
                     "error of a prediction. Measure both (scripts/bench/layouts.py).")
    return lines


def _record(candidate: Candidate) -> dict[str, Any]:
    return {"kind": candidate.kind, "flags": candidate.flags, "fits": candidate.fits,
            "settings": _sections(candidate.config, LAYOUT_SECTIONS), **asdict(candidate.prediction)}


def _sections(config: RunConfig, sections: Mapping[str, Sequence[str] | None]) -> dict[str, dict[str, Any]]:
    """Return flags by section, as the run_config.toml of a run has them."""
    whole = tomllib.loads(to_toml(config))
    return {name: {key: value for key, value in whole.get(name, {}).items() if keys is None or key in keys}
            for name, keys in sections.items()}
