"""`scripts/run_hetero_mock.sh`: the layout that it chooses, and that flags given to it win."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launch import records

ROOT = Path(__file__).resolve().parents[2]
BASH = shutil.which("bash") or "/bin/bash"

pytestmark = pytest.mark.skipif(sys.version_info[:2] != (3, 12), reason="the set-up is for Python 3.12")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """This checkout, with a `.venv` that stands for the one that the tests run in."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("mimo", "providers", "data", "train_hetero.py", "pyproject.toml", ".python-version"):
        (folder / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "scripts", folder / "scripts")
    python = folder / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!{BASH}\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    subprocess.run([BASH, "-c", f'source "{folder}/scripts/lib.sh"; record_set_up cpu'], check=True)
    return folder


def run_mock(checkout: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return subprocess.run([BASH, str(checkout / "scripts" / "run_hetero_mock.sh"), *flags], capture_output=True,
                          env=kept | {"TORCHDYNAMO_DISABLE": "1"}, text=True, timeout=280, check=False)


@pytest.mark.parametrize(("flags", "expected"), [
    (["--model-provider", "mock", "--num-experts", "8"],
     ["layout disjoint, 8 ranks, 2 lanes", "vision      0-3   1   1   4 ", "language    4-7   2   1   2   1   4 "]),
    (["--nproc", "6", "--model-provider", "mock", "--seq-length=64"],
     ["layout disjoint, 6 ranks, 3 lanes", "language    3-5   1   1   3 "]),
    (["--nproc=4", "--model-provider", "mock", "--layout", "colocated"], ["layout colocated, 4 ranks, 2 lanes"]),
    (["--nproc=4", "--model-provider", "mock", "--layout", "homogeneous"],
     ["layout homogeneous, 4 ranks, 2 lanes", "vision      0-3   2   1   2 "]),
    (["--nproc", "4", "--model-provider", "causal_lm"], ["layout disjoint, 4 ranks, 2 lanes", "language    0-3   2 "]),
    (["--model-provider", "mock", "--llm-tp", "1", "--llm-dp", "4", "--no-sequence-parallel"],
     ["layout disjoint, 8 ranks, 4 lanes", "language    4-7   1   1   4 "]),
])
def test_the_layout_follows_from_the_model_and_flags_win(checkout, flags, expected):
    done = run_mock(checkout, *flags, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert [words for words in expected if words not in done.stdout] == [], done.stdout
    assert "train_hetero.py --llm-tp " in done.stderr


@pytest.mark.parametrize(("flags", "expected"), [
    (["--nproc", "3", "--model-provider", "mock"], "--nproc 3: must be even"),
    (["--nproc", "many"], "--nproc many: must be a whole number above 0"),
    (["--nproc"], "--nproc needs a value"),
    (["--model-provider", "nowhere"], "--model-provider nowhere: unknown"),
])
def test_a_mistake_is_named(checkout, flags, expected):
    done = run_mock(checkout, *flags)
    assert done.returncode == 2 and expected in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_run_on_cpu(checkout):
    run_dir = checkout / "run"
    done = run_mock(checkout, "--nproc", "2", "--device", "cpu", "--no-bf16", "--model-provider", "mock",
                    "--seq-length", "128", "--train-iters", "2", "--run-dir", str(run_dir))
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(records(run_dir)) == 2
