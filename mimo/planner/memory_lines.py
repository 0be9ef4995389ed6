"""Lines on the expected memory of a run, for --dry-run. Plain Python."""

from __future__ import annotations

from dataclasses import replace

from mimo.config.trainer import RunConfig
from mimo.grid.spec import Layout
from mimo.planner.costs import GIB, Costs, Profile
from mimo.planner.gpus import GPUS
from mimo.planner.predict import Step
from mimo.planner.workload import SampleSize, draw_samples
from mimo.protocols import RoutedDataProvider

# Samples of a run whose sizes `memory_line` takes into account.
PLANNED_SAMPLES = 64


def memory_line(config: RunConfig, layout: Layout) -> str:
    """Return the line of --dry-run on the memory that the fullest rank is expected to need.

    Activations of images depend on the data, so they are left out for a data set that is costly to read. Rows are taken
    to have --seq-length tokens, as one of them may in a long run.
    """
    config = replace(config, data=replace(config.data, row_lengths=1))
    try:
        costs = Costs(config, Profile(GPUS["H200"]))
    except ValueError as error:
        return f"memory: not estimated: {error}"
    step = Step(config, layout, costs)
    is_read = not isinstance(config.find_dataset(config.data.dataset_provider), RoutedDataProvider)
    samples = [SampleSize(config.train.seq_length)]
    try:
        if is_read:
            samples = draw_samples(config, costs.provider, min(config.train.global_batch_size, PLANNED_SAMPLES))
    except (ValueError, OSError) as error:
        return f"memory: not estimated, as the samples cannot be read: {error}"
    needed, images, fullest = step.memory(step.batches(samples))
    part = f", {images / GIB:.3g} GiB of them for images" if images else ""
    left_out = "" if is_read or not layout.encoders else ", without activations of images"
    return (f"memory: about {needed / GIB:.3g} GiB of tensors on the fullest rank ({fullest}){part}{left_out}; on a "
            "GPU the driver and NCCL take about 5 GiB more; see mimo plan")


def state_lines(config: RunConfig, layout: Layout) -> list[str]:
    """Return lines on the memory of weights, gradients and optimizer state on each kind of rank of an RL run."""
    try:
        step = Step(config, layout, Costs(config, Profile(GPUS["H200"])))
    except ValueError as error:
        return [f"memory: not estimated: {error}"]
    lines = ["memory of a trainer rank: weights, gradients and optimizer state, without activations and the engine"]
    for name, modules in step.places():
        parts = {module: step.state_bytes(module, grid, stage) / GIB for module, grid, stage in modules}
        each = ", ".join(f"{module} {gib:.3g}" for module, gib in parts.items())
        lines.append(f"  {name}: {sum(parts.values()):.3g} GiB" + (f" ({each})" if len(parts) > 1 else ""))
    return lines
