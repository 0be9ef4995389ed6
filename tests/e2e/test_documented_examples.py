"""Examples of the documentation, followed step by step: shards, prompts with a reward, a Slurm job."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from preflight_checks.job_script import read_job
from preflight_checks.run_plan import plan

from mimo.config.cli import parse
from tests.e2e.test_readme import blocks, commands
from tests.support.launch import records

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
SBATCH = ROOT / "scripts" / "sbatch"


def documented(page: str, *words: str) -> list[str]:
    """Return the first command of a page that has these words."""
    return next(shlex.split(command) for command in commands(DOCS / page) if all(word in command for word in words))


def run(folder: Path, *command: str) -> str:
    """Run a documented command in a folder and return its output."""
    launched = {"torchrun": ["-m", "torch.distributed.run", "--standalone"], "python": []}
    program, *arguments = command
    beside = str(Path(sys.executable).parent / program)
    words = [sys.executable, *launched[program]] if program in launched else [beside]
    arguments = [str(ROOT / word) if word in ("train_hetero.py", "train_rl.py") else word for word in arguments]
    settings = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*words, *arguments], cwd=folder, env=os.environ | settings, text=True, timeout=280,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


def write_tree(page: str, folder: Path) -> None:
    """The tar files of the tree that a page shows, with made-up images."""
    (tree,) = (block for block in blocks(DOCS / page, "text") if ".tar\n" in block)
    for name, members in re.findall(r"^(\S+\.tar)\n((?: .*\n)+)", tree, re.M):
        parts = folder / "parts" / Path(name).stem
        parts.mkdir(parents=True)
        found = re.findall(r"^    (\S+) *((?:.*\n)(?: {10,}.*\n)*)", members, re.M)
        for part, content in found:
            if part.endswith((".json", ".txt")):
                (parts / part).write_text(content)
            else:
                Image.fromarray(np.zeros((40, 50, 3), np.uint8)).save(parts / part)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["tar", "-cf", str(folder / name), *(part for part, _ in found)], cwd=parts, check=True)


@pytest.mark.slow
def test_files_of_ones_own_train(tmp_path: Path) -> None:
    (tree,) = (block for block in blocks(DOCS / "own_data.md", "text") if block.startswith("datasets/cats"))
    (tmp_path / "datasets/cats/images").mkdir(parents=True)
    name, rest = tree.split("\n", 1)
    (tmp_path / name).write_text(rest[: rest.rindex("]") + 1])
    for image in re.findall(r"^\S+/images/\S+", tree, re.M):
        Image.fromarray(np.zeros((40, 50, 3), np.uint8)).save(tmp_path / image)
    run(tmp_path, *documented("own_data.md", "data.character_tokenizer"))
    run(tmp_path, *documented("own_data.md", "datasets/cats", "torchrun"), "--device", "cpu", "--run-dir", "run",
        "--max-bad-samples", "0")
    assert all(step["image-tokens"] > 0 for step in records(tmp_path / "run") if "lm loss" in step)


@pytest.mark.slow
def test_shards_of_ones_own_train(tmp_path: Path) -> None:
    write_tree("own_data.md", tmp_path)
    run(tmp_path, *documented("own_data.md", "energon", "prepare"))
    run(tmp_path, *documented("own_data.md", "data.character_tokenizer"))
    output = run(tmp_path, *documented("own_data.md", "datasets/own", "torchrun"), "--device", "cpu", "--run-dir",
                 "run", "--max-bad-samples", "0")
    assert all(step["image-tokens"] > 0 for step in records(tmp_path / "run") if "lm loss" in step)
    assert len(re.findall("val-000.tar/b0001: read '.*', is 'a bird'", output)) == 1, "each is decoded once"


def test_the_blend_is_that_of_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from scripts import prepare_digits  # imported late: it imports torch

    monkeypatch.chdir(tmp_path)
    prepare_digits.main(["digits", "--samples", "4", "--shards", "1"])
    assert blocks(DOCS / "own_data.md", "yaml") == [(tmp_path / "digits/blend.yaml").read_text()]


def test_the_prompts_of_ones_own_are_shown_as_they_are() -> None:
    assert blocks(DOCS / "rl_engine.md", "python") == [(ROOT / "tests/support/own_prompts.py").read_text()]


@pytest.mark.slow
def test_prompts_of_ones_own_train(tmp_path: Path) -> None:
    (code,) = blocks(DOCS / "rl_engine.md", "python")
    (tmp_path / "own_prompts.py").write_text(code)
    (tmp_path / "qa").mkdir()
    for split, first in (("train", 1), ("valid", 6)):
        rows = [{"question": f"{first}+{number}=", "answer": str(first + number)} for number in range(4)]
        (tmp_path / "qa" / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    run(tmp_path, *documented("rl_engine.md", "data.character_tokenizer", "qa"))
    output = run(tmp_path, *documented("rl_engine.md", "own_prompts"), "--run-dir", "run")
    steps = [step for step in records(tmp_path / "run") if "loss" in step]
    assert len(steps) == 2 and all(math.isfinite(step["loss"]) and step["gen-kl"] < 1e-5 for step in steps)
    assert max(step["reward"] for step in steps) > 0, "some letters that it draws are digits"
    assert "evaluation at iteration 2 | reward " in output and "valid/" in output


def test_the_homogeneous_job_differs_in_its_layout_alone() -> None:
    job = read_job(SBATCH / "homogeneous_8n_gbs192.sh")
    separate = read_job(SBATCH / "parity_9n_gbs192.sh")
    assert (job.nodes, separate.nodes) == (8, 9)
    assert "layout colocated, 64 ranks, 32 lanes" in plan(parse(job.flags), job.world_size)
    assert len(job.flags) == len(separate.flags)
    changed = {job.flags[place - 1]: word for place, word in enumerate(job.flags) if word != separate.flags[place]}
    for name in ("--save", "--load", "--run-dir", "--tensorboard-dir"):
        assert "nemotron-54l-8n-gbs192" in changed.pop(name)
    assert changed == {"--layout": "colocated", "--encoder-tp": "2", "--encoder-dp": "32"}
