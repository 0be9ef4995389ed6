"""What `--dry-run` prints: who does what, how much each rank holds, what crosses the bridge."""

from __future__ import annotations

from mimo.config.run import RunConfig
from mimo.config.validate import num_microbatches
from mimo.data_request import describe_images
from mimo.grid.plan import bridge_bytes, parameters_per_rank, total_parameters
from mimo.grid.spec import GridSpec, Layout, lane_shares
from mimo.grid.text import counted, format_bytes, span, table
from mimo.protocols import ModelProvider

AXES = ("tp", "cp", "dp", "pp", "ep", "expt_tp", "expt_dp")
MAX_RANKS_LISTED = 16
MAX_LINES = 10
ANY_IMAGE_SIZE = 512
"""Pixels a side of the example image for an encoder that takes any size; the next multiple below that it takes."""


def dry_run_report(config: RunConfig, layout: Layout, provider: ModelProvider) -> str:
    """The plan of a run as text, a few dozen lines for any world size.

    Args:
        config: the validated run.
        layout: its layout.
        provider: the model provider that `config` names.
    """
    parts = [*grid_parts(config, layout, provider), _batch_lines(config, layout, provider)]
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def grid_parts(config: RunConfig, layout: Layout, provider: ModelProvider) -> list[list[str]]:
    """Return the lines about the layout, the grids, their lanes and ranks, and the parameters, part by part."""
    return [
        [f"layout {layout.kind}, {counted(layout.world_size, 'rank')}, {counted(layout.num_lanes, 'lane')}"],
        _grid_table(layout),
        _lane_lines(config, layout),
        _rank_map(layout),
        _parameter_table(config, layout, provider),
    ]


def _grid_table(layout: Layout) -> list[str]:
    rows = [["grid", "ranks", *AXES]]
    rows += [[name, span(grid.ranks), *(str(getattr(grid, axis)) for axis in AXES)]
             for name, grid in layout.grids.items()]
    return table(rows)


def _lane_lines(config: RunConfig, layout: Layout) -> list[str]:
    """Which encoder data-parallel rank serves which lane."""
    if not layout.encoders:
        return [f"lanes: language dp rank l reads lane l of {layout.num_lanes}"]
    size, lines = config.train.micro_batch_size, []
    for encoder in layout.encoders:
        lines.append(f"lanes of {encoder.name} (lane l is language dp rank l)")
        served = []
        for dp in range(encoder.dp):
            shares = lane_shares(encoder.dp, layout.num_lanes, size, dp)
            lanes = span(range(shares[0].lane, shares[-1].lane + 1))
            samples = span(range(shares[0].start, shares[0].stop))
            part = f", samples {samples}" if encoder.dp > layout.num_lanes else ""
            served.append(f"  {encoder.name} dp {dp} -> lane{'s' if len(shares) > 1 else ''} {lanes}{part}")
        lines += _shortened(served)
    return lines


def _rank_map(layout: Layout) -> list[str]:
    """Every rank of a small world; ranges of ranks per replica and stage of a big one."""
    if layout.world_size <= MAX_RANKS_LISTED:
        return ["rank map", *(f"  rank {rank:>2}  " + "; ".join(_place(layout.grids[name], rank)
                                                               for name in layout.modules_of(rank))
                              for rank in range(layout.world_size))]
    lines = ["rank map (tp varies fastest, then cp, dp, pp)"]
    for name, grid in layout.grids.items():
        blocks = []
        for stage in range(grid.pp):
            for dp in range(grid.dp):
                first = grid.rank_at(dp=dp, pp=stage)
                ranks = span(range(first, first + grid.tp * grid.cp))
                blocks.append(f"  {name} dp {dp}" + (f" pp {stage}" if grid.pp > 1 else "") + f"  ranks {ranks}")
        lines += _shortened(blocks)
    return lines


def _place(grid: GridSpec, rank: int) -> str:
    position = grid.coordinates(rank)
    axes = [axis for axis in position if axis != "cp" or grid.cp > 1]
    return f"{grid.name} " + " ".join(f"{axis} {position[axis]}" for axis in axes)


def _parameter_table(config: RunConfig, layout: Layout, provider: ModelProvider) -> list[str]:
    rows = [["parameters", "total", "on a rank (largest stage)"]]
    for name, grid in layout.grids.items():
        shapes = provider.parameter_shapes(config.model_family, name)
        largest = max(parameters_per_rank(shapes, grid, stage) for stage in range(grid.pp))
        frozen = " (frozen)" if name in config.model.frozen else ""
        rows.append([name + frozen, f"{total_parameters(shapes):,}", f"{largest:,}"])
    return table(rows)


def _batch_lines(config: RunConfig, layout: Layout, provider: ModelProvider) -> list[str]:
    train = config.train
    lines = [f"batch: {counted(num_microbatches(config), 'microbatch', 'es')} per iteration "
             f"(--global-batch-size {train.global_batch_size} = {num_microbatches(config)} * --micro-batch-size "
             f"{train.micro_batch_size} * {counted(layout.num_lanes, 'lane')})"]
    if not layout.encoders:
        return lines
    images = describe_images(config, provider)
    if images is not None:
        lines.append(images)
    spec = provider.token_spec(config.model_family)
    side = max(ANY_IMAGE_SIZE // spec.size_multiple, 1) * spec.size_multiple
    height, width = spec.image_shape if spec.image_size else (side, side)
    hidden, dtype, dtype_bytes = _element(config, provider)
    for encoder in layout.encoders:
        tokens = provider.num_image_tokens(config.model_family, encoder.name, height, width)
        lane = bridge_bytes(image_tokens=tokens * train.micro_batch_size, hidden_size=hidden, dtype_bytes=dtype_bytes)
        whose = "bridge" if len(layout.encoders) == 1 else f"bridge of {encoder.name}"
        lines.append(f"{whose}: {format_bytes(lane)} per lane and microbatch, "
                     f"{format_bytes(lane * layout.num_lanes)} over all lanes, forward and again backward")
        lines.append(f"  (one {height}x{width} image per sample = {tokens} tokens, hidden size {hidden}, {dtype})")
        lines += _prefetch_lines(config, layout, provider, encoder, tokens * dtype_bytes)
    return lines


def _prefetch_lines(config: RunConfig, layout: Layout, provider: ModelProvider, encoder: GridSpec,
                    column_bytes: int) -> list[str]:
    """What a queue of features takes, for a family that lists a projector. `column_bytes`: of an image's features."""
    depth, size = config.train.encoder_prefetch_depth, config.train.micro_batch_size
    widths = [shape.shape[1] for shape in provider.parameter_shapes(config.model_family, encoder.name)
              if shape.name == "projector.linear_fc1.weight"]
    if not depth or not widths:
        return []
    samples = max(sum(share.stop - share.start for share in lane_shares(encoder.dp, layout.num_lanes, size, dp))
                  for dp in range(encoder.dp))
    return [f"encoder prefetch: up to {counted(depth, 'microbatch', 'es')} of features on each rank of {encoder.name}, "
            f"{format_bytes(depth * samples * column_bytes * widths[0])} ({widths[0]} columns)"]


def _element(config: RunConfig, provider: ModelProvider) -> tuple[int, str, int]:
    hidden = provider.hidden_size(config.model_family)
    return (hidden, "bf16", 2) if config.model.bf16 else (hidden, "fp32", 4)


def _shortened(lines: list[str]) -> list[str]:
    """The first and last lines of a long list."""
    if len(lines) <= MAX_LINES:
        return lines
    return [*lines[: MAX_LINES - 2], f"  ... {len(lines) - MAX_LINES + 1} more ...", lines[-1]]
