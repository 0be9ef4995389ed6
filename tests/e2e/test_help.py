"""Asking for help prints help, and does nothing else: every script and program that a person may start."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launch import put_commands

ROOT = Path(__file__).resolve().parents[2]
BASH = shutil.which("bash") or "/bin/bash"
# Sourced or empty: nobody starts them.
NO_SCRIPTS = {"scripts/lib.sh", "scripts/rl/common.sh", "scripts/sbatch/common.sh",
              "scripts/sbatch/nemotron_54l.sh"}
SHELL_SCRIPTS = sorted({str(path.relative_to(ROOT)) for path in (ROOT / "scripts").rglob("*.sh")} - NO_SCRIPTS
                       | {".ci/run"})
PROGRAMS = sorted(
    str(path.relative_to(ROOT)) for folder in ("", "data", "mimo", "providers", "scripts")
    for path in ((ROOT / folder).rglob("*.py") if folder else ROOT.glob("*.py"))
    if '__name__ == "__main__"' in path.read_text(encoding="utf-8"))
# They import torch first: most are processes that other programs start.
TORCH_PROGRAMS = {"scripts/bench/bridge_rank.py", "scripts/bench/refit.py", "scripts/preflight_checks/reach.py"}

# Each program runs in a fork of one process, so that the interpreter and tyro are loaded once.
RUN_ALL = """
import json, os, runpy, sys
from pathlib import Path
import mimo.config.cli
root, folder = Path(sys.argv[1]), Path(sys.argv[2])
for name in sys.argv[3:]:
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        continue
    own = folder / name.replace("/", "-")
    (own / "cwd").mkdir(parents=True)
    os.chdir(own / "cwd")
    output = os.open(own / "output", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.argv[:] = [str(root / name), "--help"]
    code = None
    try:
        if (root / name).parent.joinpath("__init__.py").exists() and not name.startswith("scripts"):
            runpy.run_module(name.removesuffix(".py").replace("/", "."), run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str((root / name).parent))
            runpy.run_path(str(root / name), run_name="__main__")
    except SystemExit as end:
        code = end.code or 0
    finally:
        sys.stdout.flush()
        loaded = sorted({"torch", "megatron", "vllm"} & set(sys.modules))
        (own / "result").write_text(json.dumps([code, loaded]))
        os._exit(0)
"""


def files_below(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def ask_for_help(folder: Path, *names: str) -> Path:
    """Ask all of these programs; gives the folder."""
    done = subprocess.run([sys.executable, "-c", RUN_ALL, ROOT, folder, *names], text=True, capture_output=True,
                          env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "120"}, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def check_help(folder: Path, name: str) -> list[str]:
    """Check what one program did; gives the large packages that it imported."""
    own = folder / name.replace("/", "-")
    output = (own / "output").read_text()
    assert (own / "result").exists(), output
    code, loaded = json.loads((own / "result").read_text())
    assert code == 0, output
    assert "usage" in output.lower() and "Traceback" not in output
    assert not any((own / "cwd").iterdir())
    return loaded


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ask_for_help(tmp_path_factory.mktemp("help"), *sorted(set(PROGRAMS) - TORCH_PROGRAMS))


@pytest.mark.parametrize("name", sorted(set(PROGRAMS) - TORCH_PROGRAMS))
def test_help_of_a_program_prints_and_does_nothing_else(name: str, results: Path) -> None:
    loaded = check_help(results, name)
    assert not loaded, f"--help waits for the import of {loaded}"


@pytest.mark.slow
def test_help_of_a_program_of_ranks_prints_and_does_nothing_else(tmp_path: Path) -> None:
    assert set(PROGRAMS) >= TORCH_PROGRAMS
    ask_for_help(tmp_path, *TORCH_PROGRAMS)
    for name in TORCH_PROGRAMS:
        check_help(tmp_path, name)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout without .venv, beside commands that stand for whatever a script may start and note their names."""
    folder = tmp_path_factory.mktemp("scripts")
    shutil.copytree(ROOT / "scripts", folder / "checkout" / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / ".ci", folder / "checkout" / ".ci")
    for file in ("pyproject.toml", ".python-version"):
        shutil.copy(ROOT / file, folder / "checkout")
    put_commands(folder, BASH, {command: f'echo {command} >>"$STATE/started"; exit 1' for command in (
        "python", "python3", "python3.12", "pip", "uv", "srun", "sbatch", "scontrol", "scancel", "setsid", "curl",
        "git")})
    (folder / "home").mkdir()
    return folder


@pytest.mark.parametrize("name", SHELL_SCRIPTS)
def test_help_of_a_script_prints_and_does_nothing_else(name: str, checkout: Path) -> None:
    home, before = checkout / "home", files_below(checkout)
    for flag in ("--help", "-h"):
        done = subprocess.run([BASH, str(checkout / "checkout" / name), flag], cwd=home, text=True, capture_output=True,
                              timeout=60, env={"PATH": f"{checkout}/bin:{os.environ['PATH']}", "HOME": str(home)},
                              check=False)
        assert done.returncode == 0, done.stderr
        assert done.stderr == "" and len(done.stdout.split()) > 5 and "set -" not in done.stdout
    assert files_below(checkout) == before, "something was started or written"
