"""`train_hetero.py` as a user types it: the plan, the exit codes, the messages; no torch, from any folder."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import train_hetero

ROOT = Path(__file__).parents[2]
MOCK = ["--model-provider", "mock", "--dataset-provider", "mock"]


@dataclass
class Done:
    """A command that has ended."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Run the command in this process. Everything up to a plan or a refusal imports no torch."""
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(*flags: str, cwd: Path = ROOT, **environment: str) -> Done:
        with monkeypatch.context() as inside:
            for name in ("RANK", "WORLD_SIZE"):
                inside.delenv(name, raising=False)
            for name, value in environment.items():
                inside.setenv(name, value)
            inside.chdir(cwd)
            try:
                code = train_hetero.main(list(flags))
            except SystemExit as ended:
                code = int(ended.code or 0)
        printed = capsys.readouterr()
        return Done(code, printed.out, printed.err)

    return run


def started(*flags: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own."""
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return subprocess.run([sys.executable, str(ROOT / "train_hetero.py"), *flags], cwd=cwd, text=True,
                          env={**kept, **environment}, capture_output=True, timeout=120, check=False)


@pytest.mark.parametrize("flags", [
    MOCK,
    [*MOCK, "--encoder-dp", "2", "--llm-tp", "2", "--micro-batch-size", "2", "--dataset-provider", "digits"],
    [*MOCK, "--layout", "colocated", "--encoder-dp", "2", "--llm-tp", "2", "--micro-batch-size", "2"],
    [*MOCK, "--num-experts", "4", "--llm-dp", "2", "--llm-ep", "2", "--llm-tp", "2", "--sequence-parallel"],
    [*MOCK, "--llm-only", "--llm-pp", "2", "--mock-text-only-fraction", "1"],
    ["--seq-length", "1024", "--encoder-dp", "2", "--llm-tp", "8", "--llm-dp", "4", "--llm-pp", "2"],
])
def test_the_plan_of_a_layout(typed, flags):
    done = typed(*flags, "--dry-run")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("layout ")
    assert "parameters " in done.stdout and "batch: " in done.stdout
    assert ("bridge: " in done.stdout) == ("--llm-only" not in flags)


def test_264_ranks_of_llava_on_a_laptop(typed):
    done = typed("--dry-run", "--world-size", "264", "--encoder-dp", "8", "--llm-tp", "8", "--llm-dp", "32",
                 "--global-batch-size", "64", "--seq-length", "2048")
    assert done.returncode == 0, done.stderr
    assert "layout disjoint, 264 ranks, 32 lanes" in done.stdout
    assert "ranks 256-263" in done.stdout
    # llava-1.5-7b: a 336-pixel image in patches of 14 is 576 tokens of 4096 bf16 numbers
    assert "bridge: 4,718,592 B (4.5 MiB) per lane" in done.stdout
    assert len(done.stdout.splitlines()) < 60


def test_the_example_image_may_be_larger_than_the_position_grid(typed):
    done = typed("--model-provider", "nemotron-moe-vlm-tiny", "--vision-max-image-size", "256", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "(one 512x512 image per sample = 1024 tokens" in done.stdout


def test_it_works_from_any_folder_and_finds_a_provider_in_it(tmp_path):
    (tmp_path / "my_family.py").write_text("from providers.mock import MockProvider\n\n\nprovider = MockProvider()\n")
    done = started(*MOCK, "--model-provider", "my_family:provider", "--dry-run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_printed_config_gives_the_same_plan(typed, tmp_path):
    flags = [*MOCK, "--encoder-dp", "2", "--llm-dp", "4", "--no-bf16", "--num-layers", "6", "--dry-run"]
    printed = typed(*flags, "--print-config")
    assert printed.returncode == 0
    (tmp_path / "run.toml").write_text(printed.stdout)
    again = typed("--config", "run.toml", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert again.stdout == typed(*flags).stdout


@pytest.mark.parametrize(("flags", "expected"), [
    (MOCK, "--train-iters or --train-samples"),
    ([*MOCK, "--train-iters", "1", "--llm-tp", "2"], "the world has 2"),
    ([*MOCK, "--train-iters", "1", "--freeze", "eyes"], "--freeze eyes"),
    (["--model-provider", "nowhere:model"], "--model-provider nowhere:model"),
    ([*MOCK, "--config", "nowhere.toml"], "--config nowhere.toml"),
    ([*MOCK, "--dry-run", "--llm-tp", "16"], "--llm-tp 16"),
])
def test_a_mistake_is_one_message_and_exit_code_2(typed, flags, expected):
    done = typed(*flags, WORLD_SIZE="2") if "--dry-run" not in flags else typed(*flags)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ") and expected in done.stderr
    assert "Traceback" not in done.stderr


def test_a_device_that_is_not_there_is_a_mistake_too():
    done = started(*MOCK, "--llm-only", "--mock-images-max", "0", "--train-iters", "1", "--device", "cuda",
                   CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    assert "error: --device cuda" in done.stderr and "Traceback" not in done.stderr


def test_one_rank_reports_and_every_rank_exits_with_2(typed):
    done = typed(*MOCK, RANK="1", WORLD_SIZE="2")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")
    plan = typed(*MOCK, "--dry-run", RANK="1", WORLD_SIZE="2")
    assert (plan.returncode, plan.stdout, plan.stderr) == (0, "", "")
