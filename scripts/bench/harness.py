"""Command lines, checks, limits of memory and output that the benchmarks have in common.

A benchmark prints Markdown tables and ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import shlex
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mimo.config.cli import parse
from mimo.config.trainer import RunConfig
from mimo.config.validate import validate
from scripts.training_runs import num_ranks, quiet

if TYPE_CHECKING:
    from mimo.platform.base import Platform

GIB = 2**30
# Messages about the host's memory, and about a GPU's if a library asks for it. These errors have no type of their own.
MEMORY_MARKS = ("DefaultCPUAllocator", "can't allocate memory", "Cannot allocate memory", "CUDA error: out of memory",
                "CUBLAS_STATUS_ALLOC_FAILED", "Cuda failure 'out of memory'")


def argument_parser(text: str | None, *, device: bool = True, **options: Any) -> argparse.ArgumentParser:
    """Return a parser that shows a program's docstring as it is written and takes no abbreviated flags."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False, **options)
    if device:
        parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    return parser


def check_least(parser: argparse.ArgumentParser, chosen: argparse.Namespace, **least: float) -> None:
    """End the program with a usage error if a flag that was given is below its least value."""
    for name, bound in least.items():
        value = vars(chosen)[name]
        if value is not None and not value >= bound:
            parser.error(f"--{name.replace('_', '-')} {value} is below {bound}")


def as_flags(options: Mapping[str, Any]) -> list[str]:
    """Return options as a command line: `{"llm_tp": 2}` becomes `--llm-tp 2`."""
    return [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def check_run_names(parser: argparse.ArgumentParser, runs: Sequence[str]) -> None:
    """End the program with a usage error unless each `--run NAME=FLAGS` has a name of its own."""
    names = [run.partition("=")[0] for run in runs]
    if not all(names) or len(set(names)) < len(names):
        parser.error(f"--run {' '.join(names)}: give each run a name of its own, NAME=FLAGS")


def plan_runs(runs: Sequence[str], further: Sequence[str], steps: int) -> dict[str, tuple[list[str], RunConfig]]:
    """Return the trainer's flags and the checked configuration of each `--run NAME=FLAGS`.

    Raises:
        ValueError: the trainer refuses a configuration.
    """
    planned = {}
    for run in runs:
        name, _, layout = run.partition("=")
        flags = [*shlex.split(layout), *further]
        config = quiet(parse([*flags, "--train-iters", str(steps)]))
        validate(config, num_ranks(config))
        planned[name] = (flags, config)
    return planned


def torchrun_command(flags: Sequence[str], config: RunConfig) -> str:
    """Return the command that a user would type to start a run."""
    return shlex.join(["torchrun", "--nproc-per-node", str(num_ranks(config)), "train_hetero.py", *flags])


def format_value(value: Any) -> str:
    """Format a figure for a cell of a table. None becomes an empty cell."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}" if value < 1000 else f"{value:,.0f}"
    return str(value)


def table(rows: Sequence[Sequence[Any]]) -> str:
    """Format rows as a Markdown table. The first row is the head."""
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join(f"| {' | '.join(map(format_value, row))} |" for row in lines)


def table_of(columns: Mapping[str, str], rows: Sequence[Mapping[str, Any]], error_cell: int) -> str:
    """Format rows of figures as a Markdown table.

    Args:
        columns: title of each column, and the key of its figures.
        rows: figures by key. `error` says why a row has none; it is empty otherwise.
        error_cell: index of the column that shows the error.
    """
    lines = [list(columns)]
    for row in rows:
        lines.append([format_value(row[key]) for key in columns.values()])
        if row["error"]:
            lines[-1][error_cell] = row["error"]
    return table(lines)


def device_name(device: str) -> str:
    """Name of the GPU, or of the processor."""
    import torch  # imported late, so that --help is quick

    return torch.cuda.get_device_name() if device == "cuda" else platform.machine()


def free_port() -> int:
    """Find a port at which nobody listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def slowest(seconds: float = 0.0, group: Any = None) -> float:
    """Wait for all ranks of a gloo group (the world by default), and return their maximum."""
    import torch
    import torch.distributed as dist

    value = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(value, op=dist.ReduceOp.MAX, group=group)
    return value.item()


def memory_gib(device: str) -> float | None:
    """Return the memory of a GPU; None on the CPU."""
    if device == "cpu":
        return None
    import torch

    return torch.cuda.get_device_properties(0).total_memory / 2**30


def check_gpus(device: str, ranks: int, whose: str = "the grids have") -> None:
    """Raise ValueError if this host has fewer GPUs than ranks are to run on."""
    if device == "cpu":
        return
    import torch

    there = torch.cuda.device_count()
    if ranks > there:
        raise ValueError(f"--device cuda: {whose} {ranks} ranks, this host has {there} GPUs")


def limit_memory(limit_gib: float | None, platform: Platform) -> None:
    """Limit the memory of tensors on the GPU or, on the CPU, of everything that is allocated from now on."""
    if limit_gib is None:
        return
    if platform.name == "cpu":
        # The limit comes on top of what Python, its libraries and their threads hold by now.
        fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        held, (_, most) = 1024 * int(fields["VmData"].split()[0]), resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (held + int(limit_gib * GIB), most))
        return
    import torch

    total = torch.cuda.get_device_properties(platform.device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(limit_gib * GIB / total, 1.0), platform.device)


@contextmanager
def exit_when_out_of_memory(report: Callable[[str], None]) -> Iterator[None]:
    """Call `report` with the error and end this process if the GPU or the host has not enough memory for the block.

    The other ranks wait for this one in a collective. torchrun ends them when this one exits.
    """
    import torch

    try:
        yield
    except (RuntimeError, MemoryError, OSError) as error:
        text = " ".join(str(error).split())
        if not (isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(mark in text for mark in MEMORY_MARKS)):
            raise
        # Undo the limit of `limit_memory`, so that the report has room.
        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        report(text or type(error).__name__)
        os._exit(1)
