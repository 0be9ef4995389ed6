"""Find out, without Slurm, what an sbatch script requests of it and how it starts the trainer."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENTRY = "train_hetero.py"
PLACEHOLDER = "/path/to/"
SLURM_COMMANDS = ("sbatch", "scancel", "scontrol", "squeue", "srun")
LIMIT_S = 60.0
PATH_VARIABLES = ("HOME", "LOGNAME", "SCRATCH", "USER", "WORK")


@dataclass(frozen=True)
class Job:
    """An sbatch script.

    Attributes:
        nodes: nodes in its `#SBATCH` lines.
        gpus_per_node: GPUs per node in its `#SBATCH` lines.
        flags: the trainer's flags.
        printed: output of the script before it starts anything.
        unedited: flags whose paths are still placeholders, with these values.
    """

    nodes: int
    gpus_per_node: int
    flags: list[str]
    printed: str
    unedited: list[str]

    @property
    def world_size(self) -> int:
        """Number of ranks, one for each GPU."""
        return self.nodes * self.gpus_per_node


def read_job(script: Path) -> Job:
    """Run a script up to its launch command, which is recorded instead of run.

    Raises:
        ValueError: the script cannot be read, fails, starts no trainer, or asks Slurm for other nodes than it uses.
    """
    try:
        text = script.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{script}: {error.strerror}") from error
    directives = read_directives(text)
    nodes, gpus = _count(directives, "nodes", script), _gpus_per_node(directives, script)
    command, printed = _launch_command(script)
    places = [place for place, word in enumerate(command) if Path(word).name == ENTRY]
    if not places:
        raise ValueError(f"{script}: its launch command does not start {ENTRY}")
    launcher, flags = command[: places[0]], command[places[0] + 1 :]
    for option, directive, value in (("--nnodes", "nodes", nodes), ("--nproc-per-node", "gpus-per-node", gpus)):
        used = launcher[launcher.index(option) + 1] if option in launcher[:-1] else None
        if used != str(value):
            raise ValueError(f"{script}: #SBATCH --{directive}={value}, and the layout of the script uses {used} "
                             f"(torchrun {option}): change one of them")
    if directives.get("ntasks-per-node", "1") != "1":
        raise ValueError(f"{script}: #SBATCH --ntasks-per-node={directives['ntasks-per-node']}: each node runs one "
                         "torchrun, which starts a process for each GPU, so it has to be 1")
    unedited = [f"{flags[place - 1]} {word}" for place, word in enumerate(flags) if word.startswith(PLACEHOLDER)]
    return Job(nodes, gpus, flags, printed, unedited)


def read_directives(text: str) -> dict[str, str]:
    """Return the long options of the `#SBATCH` lines before the first command. Bare options have empty values."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            break
        if match := re.match(r"#SBATCH\s+(.*)", line):
            for option in re.finditer(r"(?:--([\w-]+)|-([N]))(?:[=\s]\s*([^-\s][^\s]*))?", match[1].split(" #")[0]):
                found[option[1] or {"N": "nodes"}[option[2]]] = option[3] or ""
    return found


def _count(directives: dict[str, str], name: str, script: Path) -> int:
    value = directives.get(name, "").split("-")[0]
    if not value.isdecimal() or not int(value):
        raise ValueError(f"{script}: needs a line #SBATCH --{name}=N, a whole number above 0")
    return int(value)


def _gpus_per_node(directives: dict[str, str], script: Path) -> int:
    """Read `--gpus-per-node=8`, `--gpus-per-node=h100:8` or `--gres=gpu:h100:8`."""
    value = directives.get("gpus-per-node") or directives.get("gres", "")
    return _count({"gpus-per-node": value.split(":")[-1]}, "gpus-per-node", script)


def _launch_command(script: Path) -> tuple[list[str], str]:
    """Return the command that the script would start on each node, and the output of the script.

    The script runs in a folder of its own. Of the caller's environment it has what paths are often made of. Slurm's
    commands fail.
    """
    with tempfile.TemporaryDirectory() as folder:
        commands = Path(folder) / "bin"
        commands.mkdir()
        for name in SLURM_COMMANDS:
            (commands / name).write_text(f"#!/bin/sh\necho 'error: called {name} in a dry run' >&2\nexit 97\n")
            (commands / name).chmod(0o755)
        wanted = Path(folder) / "command"
        environment = {name: os.environ[name] for name in PATH_VARIABLES if name in os.environ}
        environment |= {"PATH": f"{commands}:{os.environ.get('PATH', os.defpath)}", "SLURM_SUBMIT_DIR": str(ROOT),
                        "PRINT_COMMAND": str(wanted)}
        try:
            done = subprocess.run(["bash", str(script.resolve())], cwd=folder, env=environment, text=True, check=False,
                                  stdin=subprocess.DEVNULL, capture_output=True, timeout=LIMIT_S)
        except subprocess.TimeoutExpired as error:
            raise ValueError(f"{script}: did not come to its launch command in {LIMIT_S:g} s") from error
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}, without a message"]
            raise ValueError(f"{script}: {lines[-1].removeprefix('error: ')}")
        if not wanted.is_file():
            raise ValueError(f"{script}: ended without launch_training of scripts/sbatch/common.sh")
        return wanted.read_text(encoding="utf-8").split("\0")[:-1], done.stdout
