"""Flags that take models of the Hugging Face hub, against a server that speaks its protocol."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launch import ROOT, environment, losses, torchrun
from tests.support.small_servers import COMMIT, small_hub
from tests.support.stored import save_small_llama

FLAGS = ("--model-provider", "causal_lm", "--llm-only", "--dataset-provider", "mock", "--mock-text-only-fraction", "1",
         "--hf-config", "org/small", "--load-hf", "org/small")
BATCH = ("--device", "cpu", "--no-bf16", "--seq-length", "24", "--micro-batch-size", "2", "--global-batch-size", "4",
         "--mock-min-length", "5", "--mock-max-length", "12", "--mock-images-max", "0", "--train-iters", "2")


def run(script: str, *words: str, code: int = 0, **changes: str) -> str:
    done = subprocess.run([sys.executable, *script.split(), *words], cwd=ROOT, env=environment(**changes), text=True,
                          capture_output=True, check=False, timeout=100)
    assert done.returncode == code, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout + done.stderr


def model_files(folder: Path) -> dict[str, bytes]:
    """Write a small model and return its files, beside others that no run needs."""
    save_small_llama(folder, {})
    return {path.name: path.read_bytes() for path in folder.iterdir()} | {
        "pytorch_model.bin": b"x", "original/params.json": b"{}", "modeling.py": b"raise SystemExit"}


def downloads(asked: list[str]) -> set[str]:
    return {path.rpartition("/")[2] for path in asked if "/resolve/" in path and not path.startswith("HEAD")}


def test_a_plan_needs_the_small_files_and_says_what_was_tried(tmp_path: Path) -> None:
    cache = {"HF_HUB_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "0", "HF_TOKEN": ""}
    plan = (*FLAGS, *BATCH, "--dry-run")
    with small_hub(model_files(tmp_path / "model")) as (address, asked):
        hub = cache | {"HF_ENDPOINT": address}
        assert "parameters " in run("train_hetero.py", *plan, **hub)
        assert "config.json" in downloads(asked) and not downloads(asked) & {
            "model.safetensors", "pytorch_model.bin", "params.json", "modeling.py"}
        asked.clear()
        commit = [word.replace("org/small", f"org/small@{COMMIT}") for word in plan]
        run("train_hetero.py", *commit, **hub)
        assert not downloads(asked), "all small files are in the cache"
        none = run("train_hetero.py", *plan, "--load-hf", "org/none", code=2, **hub)
        assert f"--load-hf org/none: there is no such folder, and the hub at {address} has no public model" in none
    gone = run("train_hetero.py", *plan, "--load-hf", "org/other", code=2, **hub)
    assert (f"--load-hf org/other: there is no such folder, and the hub at {address} cannot be reached, and the cache "
            f"{tmp_path}/cache (HF_HOME) does not have org/other at main") in gone
    offline = run("train_hetero.py", *FLAGS[:-2], *BATCH, "--dry-run", **hub | {"HF_HUB_OFFLINE": "1"})
    assert "parameters " in offline
    other = run("train_hetero.py", *plan, "--hf-config", "org/other@v1", code=2, **hub | {"HF_HUB_OFFLINE": "1"})
    assert "--hf-config org/other@v1: there is no such folder, and HF_HUB_OFFLINE is set, and the cache " in other


def test_a_model_without_safetensors_is_refused_before_the_run(tmp_path: Path) -> None:
    files = model_files(tmp_path / "model")
    del files["model.safetensors"]
    with small_hub(files) as (address, _):
        said = run("train_hetero.py", *FLAGS, *BATCH, "--dry-run", code=2, HF_ENDPOINT=address, HF_HUB_OFFLINE="0",
                   HF_HUB_CACHE=str(tmp_path / "cache"))
    assert f"org/small at {COMMIT} has no weights: no *.safetensors" in said


@pytest.mark.slow
def test_weights_that_the_cache_lacks_need_the_hub(tmp_path: Path) -> None:
    cache, plan = {"HF_HUB_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "0"}, (*FLAGS, *BATCH, "--dry-run")
    with small_hub(model_files(tmp_path / "model")) as (address, _):
        run("train_hetero.py", *plan, HF_ENDPOINT=address, **cache)
    # huggingface_hub tries for 24 s to reach it.
    gone = run("train_hetero.py", *plan, code=2, HF_ENDPOINT=address, **cache)
    assert f"the hub at {address} cannot be reached, and the cache {tmp_path}/cache (HF_HOME) does not have" in gone


@pytest.mark.slow
def test_one_rank_of_a_node_downloads_and_the_run_is_that_of_the_folder(tmp_path: Path) -> None:
    files = model_files(tmp_path / "model")
    with small_hub(files) as (address, asked):
        hub = {"HF_HUB_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": address}
        done = torchrun(2, *FLAGS, *BATCH, "--llm-dp", "2", "--run-dir", str(tmp_path / "hub"), **hub)
        assert done.returncode == 0, done.stdout[-3000:]
        assert sum(path.endswith("model.safetensors") for path in asked if path.startswith("/")) == 1
        assert downloads(asked) == {"config.json", "model.safetensors"}
        assert sum("/api/models/org/small/revision/" in path for path in asked) <= 2
    local = [word.replace("org/small", str(tmp_path / "model")) for word in FLAGS]
    done = torchrun(2, *local, *BATCH, "--llm-dp", "2", "--run-dir", str(tmp_path / "folder"))
    assert done.returncode == 0, done.stdout[-3000:]
    assert losses(tmp_path / "hub") == losses(tmp_path / "folder")
    # Started again without the hub, the run finds everything in the cache; so does an import.
    again = hub | {"HF_HUB_OFFLINE": "1"}
    done = torchrun(1, *FLAGS, *BATCH, "--run-dir", str(tmp_path / "again"), **again)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "org--small" in run("-m mimo import", "org/small", str(tmp_path / "imported"), **again)
