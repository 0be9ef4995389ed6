"""Turns the layout flags into a checked `Layout`, which says which ranks hold what.

This is plain Python, so a layout for any world size can be checked on any machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import fields

from mimo.config.checks import refuse
from mimo.config.toml_file import flag_name
from mimo.config.trainer import LayoutConfig
from mimo.grid.spec import GridSpec, Layout
from mimo.protocols import LANGUAGE
from mimo.text import counted

MAX_SUGGESTIONS = 3
# Microbatches that are encoded together where the language model has pipeline stages.
DEFAULT_WINDOW = 2
ENCODER_FLAGS = ("encoder_tp", "encoder_dp", "encoder_pp")
MAY_BE_ZERO = ("llm_offset", "encoder_window", "encoder_chunk", "encoder_activation_gib", "encoder_run_ahead")


def build_layout(config: LayoutConfig, world_size: int, encoders: tuple[str, ...]) -> Layout:
    """Return the layout that the flags describe. `validate_layout` checks that it works.

    Args:
        config: the layout flags; the encoder flags describe the one encoder of the provider.
        world_size: number of ranks.
        encoders: names of the provider's encoders.

    Raises:
        ValueError: flags contradict each other, or the model has several encoders. Their grids have no flags, so
            make the `GridSpec`s and the `Layout` in Python.
    """
    encoders = () if config.llm_only else encoders
    if len(encoders) > 1:
        raise ValueError(f"the encoder flags describe one encoder, the model has {', '.join(encoders)}: "
                         "build its GridSpecs and Layout in Python")
    grids = tuple(GridSpec(name, tp=config.encoder_tp, dp=config.encoder_dp, pp=config.encoder_pp) for name in encoders)
    _check_flags(config, grids)
    if config.layout == "homogeneous":
        grids = tuple(GridSpec(name, tp=config.llm_tp, cp=config.llm_cp, dp=config.llm_dp) for name in encoders)
    offset = sum(grid.size for grid in grids) if config.layout == "disjoint" else 0
    language = GridSpec(LANGUAGE, offset=offset, tp=config.llm_tp, cp=config.llm_cp, dp=config.llm_dp, pp=config.llm_pp,
                        ep=config.llm_ep, expt_tp=config.llm_expt_tp, stage_layers=_stage_layers(config))
    return Layout(config.layout, world_size, grids, language, _encoder_window(config, grids))


def _stage_layers(config: LayoutConfig) -> tuple[int, ...]:
    """Parse --llm-pp-layout."""
    given = config.llm_pp_layout
    if given is None:
        return ()
    counts = given.split(",")
    refuse(not all(count.strip().isdecimal() and int(count) > 0 for count in counts),
           f"--llm-pp-layout {given}: give the layers of each stage, such as 16,24")
    refuse(len(counts) != config.llm_pp,
           f"--llm-pp-layout {given} has {len(counts)} stages, but --llm-pp is {config.llm_pp}")
    refuse(config.llm_pp == 1, f"--llm-pp-layout {given} needs --llm-pp above 1; leave it out")
    refuse(len({int(count) for count in counts[1:-1]}) > 1,
           f"--llm-pp-layout {given}: only the first and the last stage may differ (Megatron Core); the stages between "
           "them need the same number of layers")
    return tuple(map(int, counts))


def _encoder_window(config: LayoutConfig, grids: tuple[GridSpec, ...]) -> int | None:
    """Return the window of --encoder-window, or its default.

    With pipeline stages or context parallelism there is no other way to encode.
    """
    window, gib = config.encoder_window, config.encoder_activation_gib
    refuse(gib is not None and not 0 <= gib < float("inf"),
           f"--encoder-activation-gib {gib} is not a number of GiB from 0 on")
    has_windows = config.layout == "colocated" and bool(grids)
    where = f"--layout {config.layout}" if grids else "a run without encoder"
    refuse(window is not None and not has_windows,
           f"--encoder-window {window} with {where}: only the colocated layout encodes the images of several "
           "microbatches together; leave it out")
    if window is None and has_windows and (config.llm_pp > 1 or config.llm_cp > 1):
        return DEFAULT_WINDOW
    for given, flag in ((not config.encoder_balance, "--no-encoder-balance"),
                        (config.encoder_chunk > 0, f"--encoder-chunk {config.encoder_chunk}"),
                        (gib is not None, f"--encoder-activation-gib {gib}")):
        refuse(given and window is None and has_windows, f"{flag} needs --encoder-window")
        refuse(given and window is None,
               f"{flag} with {where}: only the colocated layout has encoder windows; leave it out")
    return window


def required_world_size(config: LayoutConfig, encoders: tuple[str, ...]) -> int:
    """Return the number of ranks that the grids of the flags need. Raises ValueError as `build_layout` does."""
    layout = build_layout(config, 0, encoders)
    return max(grid.ranks.stop for grid in layout.grids.values())


def _check_flags(config: LayoutConfig, grids: tuple[GridSpec, ...]) -> None:
    """Check what a `Layout` no longer shows: flags that have no effect without an encoder, and a wrong --llm-offset."""
    for field in fields(config):
        value = getattr(config, field.name)
        least = 0 if field.name in MAY_BE_ZERO else 1
        refuse(type(value) is int and value < least, f"{flag_name(field.name)} {value} is below {least}")
    if not grids:
        why = "--llm-only" if config.llm_only else "a model without encoder"
        given = [f"{flag_name(name)} {getattr(config, name)}" for name in ENCODER_FLAGS if getattr(config, name) != 1]
        refuse(bool(given), f"{why} has no encoder grid: leave out {', '.join(given)}")
        refuse(config.layout != "disjoint", f"--layout {config.layout} has no effect with {why}: leave it out")
    if config.layout == "homogeneous":
        taken = {"encoder_tp": config.llm_tp, "encoder_dp": config.llm_dp, "encoder_pp": 1}
        for name, value in taken.items():
            refuse(getattr(config, name) not in (1, value),
                   f"{flag_name(name)} {getattr(config, name)}: in the homogeneous layout the encoder is split as the "
                   f"first language stage, {flag_name(name)} {value}; leave it out")
    start = sum(grid.size for grid in grids) if config.layout == "disjoint" else 0
    if config.llm_offset not in (None, start):
        where = "there is no encoder"
        if config.layout != "disjoint":
            where = f"in the {config.layout} layout every grid starts at rank 0"
        elif grids:
            where = f"the language grid starts right after the encoder ({_terms(grids)})"
        raise ValueError(f"--llm-offset {config.llm_offset}: {where}, so leave it out or set --llm-offset {start}")


def validate_layout(layout: Layout, *, micro_batch_size: int, global_batch_size: int, num_experts: int | None = None,
                    sequence_parallel: bool = False, lane_rows: int | None = None) -> None:
    """Check that the grids tile the world, that the lanes divide, and that the batch and the experts fit.

    Args:
        layout: grids of all modules.
        micro_batch_size: samples of one lane in one microbatch.
        global_batch_size: samples of all lanes in one iteration.
        num_experts: routed experts of a MoE layer of the language model; None or 0 where it is dense.
        sequence_parallel: whether the language model runs with sequence parallelism.
        lane_rows: rows of a lane's microbatch that encoder ranks may share; None: `micro_batch_size`.

    Raises:
        ValueError: the first thing found wrong, with the flags, their values and what would fit.
    """
    _check_grids(layout)
    _check_experts(layout.language, num_experts or 0, sequence_parallel)
    if layout.kind == "colocated":
        _check_colocated(layout, micro_batch_size)
    elif layout.kind == "homogeneous":
        _check_homogeneous(layout, micro_batch_size)
    elif layout.kind == "disjoint":
        _check_disjoint(layout, micro_batch_size)
    else:
        raise ValueError(f"--layout {layout.kind} must be disjoint, colocated or homogeneous")
    for name, value in (("--micro-batch-size", micro_batch_size), ("--global-batch-size", global_batch_size)):
        refuse(value < 1, f"{name} {value} is below 1")
    for encoder in layout.encoders if layout.encoder_window is None else ():
        _check_lanes(encoder, layout.language, lane_rows or micro_batch_size)
    unit = micro_batch_size * layout.language.dp
    if global_batch_size % unit:
        lower, upper = global_batch_size // unit * unit, -(-global_batch_size // unit) * unit
        nearest = f"nearest are {lower} and {upper}" if lower else f"the smallest is {upper}"
        raise ValueError(f"--global-batch-size {global_batch_size} is not a multiple of "
                         f"--micro-batch-size {micro_batch_size} * --llm-dp {layout.language.dp} = {unit}; {nearest}")


def _check_grids(layout: Layout) -> None:
    """Check the sizes of each grid by itself."""
    for grid in layout.grids.values():
        for axis in ("tp", "cp", "dp", "pp", "ep", "expt_tp"):
            size = getattr(grid, axis)
            refuse(size < 1, f"{_axis_flag(grid, axis)} {size} is below 1")
            # In a homogeneous layout the encoder has a copy on each context-parallel rank of the language model.
            copies = axis == "cp" and layout.kind == "homogeneous"
            refuse(size > 1 and axis in ("cp", "ep", "expt_tp") and grid.name != LANGUAGE and not copies,
                   f"{_axis_flag(grid, axis)} {size} is not supported yet; only 1 is")
        refuse(grid.offset < 0, f"grid {grid.name!r} starts at rank {grid.offset}, below 0")


def _check_experts(language: GridSpec, num_experts: int, sequence_parallel: bool) -> None:
    parallel = f"--llm-ep {language.ep} * --llm-expt-tp {language.expt_tp}"
    refuse(sequence_parallel and language.tp == 1, "--sequence-parallel needs --llm-tp above 1, it is 1")
    if not num_experts:
        refuse(language.ep * language.expt_tp > 1,
               f"{parallel} splits experts, but the model has none (--num-experts 0)")
        return
    if num_experts % language.ep:
        raise ValueError(f"--num-experts {num_experts} is not divisible by --llm-ep {language.ep}; these fit: --llm-ep "
                         + ", ".join(map(str, divisors(num_experts))))
    ranks = language.tp * language.cp * language.dp
    if ranks % (language.ep * language.expt_tp):
        fit = [ep for ep in divisors(num_experts) if ranks % (ep * language.expt_tp) == 0]
        hint = "; these fit: --llm-ep " + ", ".join(map(str, fit)) if fit else ""
        product = f"--llm-tp {language.tp} * --llm-cp {language.cp} * --llm-dp {language.dp}"
        raise ValueError(f"{parallel} = {language.ep * language.expt_tp} does not divide the {ranks} ranks of a stage "
                         f"of the language grid ({product}){hint}")
    refuse(language.tp > 1 and not sequence_parallel,
           f"--num-experts {num_experts} with --llm-tp {language.tp} needs --sequence-parallel (Megatron's MoE layer "
           "refuses tensor parallelism without it)")


def _check_disjoint(layout: Layout, micro_batch_size: int) -> None:
    """Check that the grids follow each other without gap or overlap and fill the world."""
    grids = sorted(layout.grids.values(), key=lambda grid: grid.offset)
    end, previous = 0, None
    for grid in grids:
        if grid.offset < end:
            assert previous is not None
            raise ValueError(f"grid {grid.name!r} starts at rank {grid.offset}, inside grid {previous.name!r} "
                             f"(ranks {previous.offset}-{end - 1}); it can start at rank {end} "
                             "(--llm-offset for the language grid)")
        if grid.offset > end:
            raise ValueError(f"ranks {end}-{grid.offset - 1} before grid {grid.name!r} hold nothing; "
                             f"it has to start at rank {end} (--llm-offset for the language grid)")
        end, previous = grid.ranks.stop, grid
    if end != layout.world_size:
        hint = ""
        if layout.encoders and all(grid.size == layout.world_size for grid in grids):
            hint = "; --layout colocated puts them on the same ranks"
        raise ValueError(f"the grids need {counted(end, 'rank')} ({_terms(layout.grids.values())}), "
                         f"the world has {layout.world_size}; run {counted(end, 'rank')}, or change the sizes: "
                         f"{_fitting(layout, micro_batch_size)}{hint}")


def _check_colocated(layout: Layout, micro_batch_size: int) -> None:
    """Check that every grid spans the whole world from rank 0, and that encoders have one stage."""
    for grid in layout.grids.values():
        refuse(grid.pp > 1 and grid.name != LANGUAGE,
               f"{_axis_flag(grid, 'pp')} {grid.pp}: in the colocated layout only the language model has pipeline "
               "stages; use 1, or --layout disjoint")
        for axis, size in (("pp", grid.pp), ("cp", grid.cp)):
            refuse(size > 1 and bool(layout.encoders) and layout.encoder_window is None,
                   f"--llm-{axis} {size} in the colocated layout needs --encoder-window")
        refuse(grid.offset != 0, f"grid {grid.name!r} starts at rank {grid.offset}: in the colocated layout every grid "
               "starts at rank 0 (--llm-offset 0)")
    sizes = {grid.size for grid in layout.grids.values()}
    if sizes != {layout.world_size}:
        problem = "differ in size" if len(sizes) > 1 else "do not fill the world"
        raise ValueError(f"colocated grids have to span the same ranks, but these {problem} "
                         f"({_terms(layout.grids.values())}; the world has {layout.world_size}); "
                         + _fitting(layout, micro_batch_size))


def _check_homogeneous(layout: Layout, micro_batch_size: int) -> None:
    """Check that the language model spans the world from rank 0, and that encoders are split as its first stage."""
    language = layout.language
    if language.offset or language.size != layout.world_size:
        raise ValueError(f"the language grid needs {counted(language.size, 'rank')} ({_terms([language])}), the world "
                         f"has {layout.world_size}; {_fitting(layout, micro_batch_size)}")
    for encoder in layout.encoders:
        expected = (0, language.tp, language.cp, language.dp, 1)
        if (encoder.offset, encoder.tp, encoder.cp, encoder.dp, encoder.pp) != expected:
            raise ValueError(f"grid {encoder.name!r} ({_terms([encoder])}) is not split as the first language stage "
                             f"({_terms([language])})")


def _check_lanes(encoder: GridSpec, language: GridSpec, micro_batch_size: int) -> None:
    """Check that each encoder data-parallel rank serves whole lanes, or an equal share of one with a sample in it."""
    dp, lanes = _axis_flag(encoder, "dp"), language.dp
    if encoder.dp % lanes and lanes % encoder.dp:
        fit = divisors(lanes) + [lanes * part for part in range(2, micro_batch_size + 1)]
        shown = ", ".join(map(str, fit[:12])) + (f", ... {fit[-1]}" if len(fit) > 12 else "")
        raise ValueError(f"{dp} {encoder.dp} and --llm-dp {lanes}: one has to divide the other; with --llm-dp {lanes} "
                         f"and --micro-batch-size {micro_batch_size} these fit: {dp} {shown}")
    if encoder.dp > lanes * micro_batch_size:
        per_lane = encoder.dp // lanes
        raise ValueError(f"{dp} {encoder.dp} over --llm-dp {lanes} shares each lane among {per_lane} encoder ranks, "
                         f"and --micro-batch-size {micro_batch_size} leaves some without a sample; "
                         f"the smallest that fits is --micro-batch-size {per_lane}")


def _fitting(layout: Layout, micro_batch_size: int) -> str:
    """Suggest the nearest --encoder-dp and --llm-dp with which the grids tile the world."""
    language, world = layout.language, layout.world_size
    has_flags = bool(layout.encoders) and layout.kind != "homogeneous"
    if len(layout.encoders) > 1:
        return "change the sizes of the grids"
    wide = language.tp * language.cp * language.pp
    # (changes --micro-batch-size, distance from the given sizes, language dp, flags): the best sorts first.
    found: list[tuple[bool, int, int, str]] = []
    for dp in range(1, world // wide + 1):
        rest = world - wide * dp
        if language.tp * language.cp * dp % (language.ep * language.expt_tp) or (layout.kind == "colocated" and rest):
            continue
        if has_flags:
            found += _fitting_encoder(layout, dp, world if layout.kind == "colocated" else rest, micro_batch_size)
        elif rest == 0:
            found.append((False, abs(dp - language.dp), dp, f"--llm-dp {dp}"))
    if not found:
        flags = "--encoder-dp and --llm-dp" if has_flags else "--llm-dp"
        return f"no {flags} can fill {counted(world, 'rank')} with the other sizes as they are"
    best = [text for changes, _, _, text in sorted(found) if not changes or all(item[0] for item in found)]
    return f"these fit {counted(world, 'rank')}: " + ", or ".join(best[:MAX_SUGGESTIONS])


def _fitting_encoder(layout: Layout, language_dp: int, ranks: int,
                     micro_batch_size: int) -> list[tuple[bool, int, int, str]]:
    """Return the one entry of `_fitting` for an encoder grid on `ranks` ranks beside `language_dp`, or none."""
    encoder, language = layout.encoders[0], layout.language
    encoder_dp, left = divmod(ranks, encoder.tp * encoder.pp)
    pooled = layout.encoder_window is not None
    if left or not encoder_dp or (not pooled and encoder_dp % language_dp and language_dp % encoder_dp):
        return []
    text = f"{_axis_flag(encoder, 'dp')} {encoder_dp} --llm-dp {language_dp}"
    smallest = 1 if pooled else -(-encoder_dp // language_dp)
    if smallest > micro_batch_size:
        text += f" --micro-batch-size {smallest}"
    distance = abs(language_dp - language.dp) + abs(encoder_dp - encoder.dp)
    return [(smallest > micro_batch_size, distance, language_dp, text)]


def divisors(number: int) -> list[int]:
    """Return the positive divisors of a number, at least 1, ascending."""
    small = [each for each in range(1, math.isqrt(number) + 1) if number % each == 0]
    return sorted({*small, *(number // each for each in small)})


def _axis_flag(grid: GridSpec, axis: str) -> str:
    return flag_name(f"{'llm' if grid.name == LANGUAGE else 'encoder'}_{axis}")


def _terms(grids: Iterable[GridSpec]) -> str:
    """Describe the sizes of grids, such as `vision: --encoder-tp 1 * --encoder-dp 2 * --encoder-pp 1 = 2`."""
    return "; ".join(f"{grid.name}: " + " * ".join(f"{_axis_flag(grid, axis)} {getattr(grid, axis)}"
                                                  for axis in ("tp", "cp", "dp", "pp") if axis != "cp" or grid.cp > 1)
                     + f" = {grid.size}" for grid in grids)
