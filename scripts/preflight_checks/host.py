"""Check one host by itself: its GPUs and packages, the paths of a run, the space for checkpoints."""

from __future__ import annotations

import importlib.util
import os
import resource
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from mimo.checkpoint.paths import check_writable, saved_iterations
from preflight_checks.run_plan import Checkpoints

# A GPU with more memory in use has another process on it. An idle one uses some hundred megabytes.
MAX_USED_MIB = 2048
QUERY = ("index", "name", "memory.total", "memory.used", "ecc.errors.uncorrected.volatile.total")
NVIDIA_SMI_LIMIT_S = 60.0
# Files that a process has open besides its connections to other ranks: libraries, data, checkpoints.
OTHER_FILES = 512
UNITS = {"KiB": 1024, "MiB": 1024**2, "GiB": 1024**3, "TiB": 1024**4}


@dataclass
class Findings:
    """Results of the checks of a host.

    Attributes:
        facts: results of passed checks, for the report.
        problems: reasons to end the job, each with its values.
        warnings: problems that do not end the job.
    """

    facts: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def format_size(count: float) -> str:
    """Format bytes in binary units with one decimal place."""
    unit = next(unit for unit in ("TiB", "GiB", "MiB", "KiB") if count >= UNITS[unit] or unit == "KiB")
    return f"{count / UNITS[unit]:,.1f} {unit}"


def check_gpus(expected: int, findings: Findings) -> None:
    """Count the GPUs, and check them for memory in use and for uncorrected memory errors."""
    command = ["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, text=True, capture_output=True, timeout=NVIDIA_SMI_LIMIT_S, check=False)
    except FileNotFoundError:
        findings.problems.append(f"GPUs: there is no nvidia-smi; {expected} GPUs are needed")
        return
    except subprocess.TimeoutExpired:
        findings.problems.append(f"GPUs: nvidia-smi did not answer in {NVIDIA_SMI_LIMIT_S:g} s")
        return
    if done.returncode:
        findings.problems.append(f"GPUs: nvidia-smi: {last_line(done.stdout + done.stderr)}")
        return
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = len(rows) if visible is None else min(len(rows), len([name for name in visible.split(",") if name]))
    if count < expected:
        limit = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"
        findings.problems.append(f"GPUs: {count} visible{limit}, {expected} are needed")
    # A GPU that does not answer has a message in place of its row.
    findings.problems += [f"GPUs: nvidia-smi: {', '.join(row)}" for row in rows if len(row) != len(QUERY)]
    rows = [row for row in rows if len(row) == len(QUERY)]
    for index, name, total, used, errors in rows:
        if used.isdecimal() and int(used) > MAX_USED_MIB:
            findings.problems.append(f"GPU {index}: {used} MiB of {total} are in use, more than {MAX_USED_MIB}; "
                                     "another process is on it")
        if errors.isdecimal() and int(errors):
            findings.problems.append(f"GPU {index} ({name}): {errors} uncorrected ECC errors since it was reset")
    if rows:
        free = min((int(row[2]) - int(row[3]) for row in rows if row[2].isdecimal() and row[3].isdecimal()), default=0)
        findings.facts.append(f"{count} x {rows[0][1]}, at least {free:,} MiB free")


def check_read(paths: dict[str, Path], findings: Findings) -> None:
    """Check that each file can be read and each folder can be listed."""
    for flag, path in paths.items():
        try:
            if path.is_dir():
                next(path.iterdir(), None)
            else:
                with path.open("rb") as file:
                    file.read(1)
        except OSError as error:
            findings.problems.append(f"{flag} {path}: cannot be read: {error.strerror}")
        else:
            findings.facts.append(f"{flag} {path}: can be read")


def check_written(paths: dict[str, Path], findings: Findings) -> None:
    """Check that each folder can be made and a file can be written into it."""
    for flag, path in paths.items():
        try:
            path.mkdir(parents=True, exist_ok=True)
            check_writable(path, f"{socket.gethostname()}_{os.getpid()}")
        except OSError as error:
            findings.problems.append(f"{flag} {path}: cannot be written: {error.strerror}")
        else:
            findings.facts.append(f"{flag} {path}: can be written")


def check_space(save: Path, wanted: Checkpoints, findings: Findings) -> None:
    """Compare the free space with the next two checkpoints (a problem) and with all to come (a warning)."""
    if not save.is_dir():
        return
    free, there = shutil.disk_usage(save).free, len(saved_iterations(save))
    size = f"a checkpoint of about {format_size(wanted.bytes_each)}"
    # An older checkpoint is deleted only when the new one is complete.
    to_come = min(wanted.saves, max(wanted.kept - there, 0) + 1)
    soon = min(to_come, 2)
    findings.facts.append(f"--save {save}: {format_size(free)} free, {size}")
    if free < soon * wanted.bytes_each:
        findings.problems.append(f"--save {save}: {format_size(free)} free, and {soon} times {size} need "
                                 f"{format_size(soon * wanted.bytes_each)}")
    elif free < to_come * wanted.bytes_each:
        findings.warnings.append(f"--save {save}: {format_size(free)} free, and the {to_come} checkpoints to come need "
                                 f"{format_size(to_come * wanted.bytes_each)}: set --keep-last or a longer "
                                 "--save-interval")


def check_open_files(world_size: int, findings: Findings) -> None:
    """Compare the hard limit of open files, up to which the job raises the soft one, with what its ranks need.

    The launcher of the first node, which needs the most, has two connections to every rank.
    """
    limit, needed = resource.getrlimit(resource.RLIMIT_NOFILE)[1], 2 * world_size + OTHER_FILES
    if limit != resource.RLIM_INFINITY and limit < needed:
        findings.problems.append(f"open files: the hard limit (ulimit -Hn) is {limit}, and {world_size} ranks need "
                                 f"about {needed}, two connections for each rank and {OTHER_FILES} more; have the "
                                 "cluster's administrators raise it")


def last_line(text: str) -> str:
    """Return the last line that is not empty. Programs name their error there."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no message"


def check_transformer_engine(timeout_s: float, findings: Findings) -> None:
    """Import Transformer Engine in another process, which fails if it was built for another torch."""
    # torch comes first, as in the trainer, because it loads libraries such as NCCL that Transformer Engine needs.
    command = [sys.executable, "-c", "import torch, transformer_engine.pytorch"]
    needed = "--transformer-impl transformer_engine: the package"
    try:
        done = subprocess.run(command, text=True, capture_output=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        findings.problems.append(f"{needed} was not imported in {timeout_s:g} s")
        return
    if done.returncode:
        findings.problems.append(f"{needed} cannot be imported by {sys.executable}: {last_line(done.stderr)}; "
                                 "scripts/setup.sh gpu installs it")
    else:
        findings.facts.append("Transformer Engine can be imported")


def check_mamba_kernels(findings: Findings) -> None:
    """Warn if the kernels of Mamba-2 layers are missing."""
    packages = {"mamba_ssm": "mamba-ssm", "causal_conv1d": "causal-conv1d"}
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        findings.warnings.append(f"Mamba-2 layers are slower without {' and '.join(missing)}; install with: "
                                 f"pip install --no-build-isolation {' '.join(packages[name] for name in missing)}")
    else:
        findings.facts.append("kernels of Mamba-2 layers are installed")
