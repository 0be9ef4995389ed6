"""Files, folders and packages that flags name, before anything is started."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import train_hetero
import train_rl
from data.mock import MockProvider
from mimo.checkpoint.paths import METADATA, write_tracker

ROOT = Path(__file__).parents[3]
RL = ("--config", str(ROOT / "scripts/configs/rl_arithmetic_model.toml"), "--config",
      str(ROOT / "scripts/configs/rl_arithmetic.toml"), "--dry-run")


@dataclass(frozen=True)
class OwnConfig(MockProvider.Config):
    own_list: str = "nowhere/list.txt"
    """A file that is not there."""


class OwnProvider(MockProvider):
    """A data set of somebody else, which finds out by itself what is missing."""

    Config = OwnConfig

    def validate(self, config, tokens):
        Path(config.own_list).read_text()


own = OwnProvider()
MOCK = ("--model-provider", "mock", "--dataset-provider", "mock", "--dry-run")


@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def checkpoint(root: Path, iteration: int = 5) -> None:
    folder = root / f"iter_{iteration:07d}"
    folder.mkdir(parents=True)
    (folder / METADATA).write_text("{}")
    write_tracker(root, str(iteration))


@pytest.mark.parametrize(("flags", "expected"), [
    ("--load gone", "--load gone does not exist; a run starts from scratch only if --save names the same folder"),
    ("--load empty", "--load empty holds no checkpoint"),
    ("--load some --ckpt-step 7", "--load some: --ckpt-step 7 names iter_0000007, which is not there; complete: 5"),
    ("--load some --save some --ckpt-step 7", "--ckpt-step 7 names iter_0000007, which is not there"),
    ("--load-hf gone", "--load-hf gone: there is no such folder; a model of the Hugging Face hub is named "),
    ("--load-hf empty", "--load-hf empty: the folder has no weights"),
    ("--load-language-from gone", "--load-language-from gone: there is no such folder"),
    ("--save file/run", "--save file/run: cannot be written: "),
    ("--run-dir file", "--run-dir file: cannot be written: "),
    ("--tensorboard-dir file/tb", "--tensorboard-dir file/tb: cannot be written: "),
    ("--mlflow-uri file/runs", "--mlflow-uri file/runs: "),
    ("--wandb-project x", "--wandb-project x: the package wandb is not installed"),
    ("--dataset-provider tests.unit.config.test_validate_paths:own",
     "--dataset-provider tests.unit.config.test_validate_paths:own: [Errno 2] No such file or directory: "
     "'nowhere/list.txt'"),
    ("--dataset-provider digits --digits-min 9", "--digits-min 9 --digits-max"),
    ("--dataset-provider energon --data-path gone", "--data-path gone: does not exist"),
    ("--model-provider nemotron-moe-vlm-tiny --load-nemotron-checkpoint gone",
     "--load-nemotron-checkpoint gone: there is no such folder"),
])
def test_a_dry_run_names_what_is_missing_in_one_line(flags, expected, tmp_path, capsys, monkeypatch):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    checkpoint(tmp_path / "some")
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "wandb" else find_spec(name))
    assert train_hetero.main([*MOCK, *flags.split()]) == 2
    error = capsys.readouterr().err
    assert expected in error and error.count("\n") == 1


def test_nothing_is_made_and_what_is_there_is_taken(tmp_path, capsys):
    checkpoint(tmp_path / "some")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "model.safetensors").write_text("")
    for flags in ("--load some", "--load new --save new --load-hf hf", "--load some --save some --load-hf gone",
                  "--load gone --save some"):
        assert train_hetero.main([*MOCK, *flags.split()]) == 0, flags
    assert capsys.readouterr().err == ""
    assert {path.name for path in tmp_path.iterdir()} == {"some", "hf"}


def test_a_folder_that_may_not_be_written_is_named(tmp_path):
    (tmp_path / "kept").mkdir(mode=0o555)
    prefix = [] if os.getuid() else [shutil.which("setpriv") or "setpriv", "--bounding-set=-dac_override"]
    done = subprocess.run([*prefix, sys.executable, str(ROOT / "train_hetero.py"), *MOCK, "--save", "kept/run"],
                          capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (
        2, f"error: --save kept/run: cannot be written: {tmp_path}/kept: Permission denied\n")


def test_a_dry_run_of_reinforcement_learning_prints_grids_engine_and_batch(capsys):
    assert train_rl.main([*RL, "--llm-dp", "4", "--engine-dp", "2", "--engine-tp", "2", "--device", "cuda",
                          "--updates-per-rollout", "2"]) == 0
    plan = capsys.readouterr().out
    assert "layout disjoint, 4 ranks, 4 lanes" in plan and "parameters " in plan
    assert "engine: 2 replicas of 2 workers (--engine-tp 2 * --engine-pp 1), separate" in plan
    assert "GPUs: 8, 4 for the trainer's ranks and 4 for the engine" in plan
    assert "batch: 128 prompts * 8 completions (--completions-per-prompt) = 1024 completions of an iteration" in plan
    assert "512 completions each, 128 on each of 4 lanes" in plan
    assert "microbatches: up to 1 of an update on each lane" in plan
    assert train_rl.main([*RL, "--engine-placement", "colocated", "--device", "cuda"]) == 0
    assert "GPUs: 1, one for each trainer rank; the engine shares 1" in capsys.readouterr().out
    weights = []
    for shared in ((), ("--engine-share-experts",)):
        assert train_rl.main([*RL, "--num-experts", "256", "--moe-ffn-hidden-size", "65536", "--engine-dp", "4",
                              "--device", "cuda", *shared]) == 0
        plan = capsys.readouterr().out
        assert ("which share the experts, separate" in plan) is bool(shared)
        weights.append(float(re.findall(r"about (\d+\.\d) GiB of weights", plan)[0]))
    assert weights[1] < 0.5 * weights[0]
    assert not Path("runs").exists()


@pytest.mark.parametrize(("flags", "expected"), [
    ("--load gone --finetune", "--load gone does not exist"),
    ("--ref-load gone --kl-coeff 0.1", "--ref-load gone does not exist"),
    ("--ref-load-hf gone --kl-coeff 0.1", "--ref-load-hf gone: there is no such folder"),
    ("--tokenizer gone", "--tokenizer gone: there is no such folder"),
    ("--reward nowhere:reward", "--reward nowhere:reward: there is no module 'nowhere'"),
    ("--completions-per-prompt 3", "it is not divisible by --completions-per-prompt 3"),
])
def test_a_dry_run_of_reinforcement_learning_names_what_is_wrong(flags, expected, capsys):
    assert train_rl.main([*RL, *flags.split()]) == 2
    error = capsys.readouterr().err
    assert expected in error and error.count("\n") == 1
