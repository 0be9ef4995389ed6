"""Description of the run that wrote a checkpoint: flags that differ from the present ones, and progress."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mimo.checkpoint.differences import config_differences, model_differences, model_fields
from mimo.checkpoint.state import Progress, RunState, common_state, weights_only_state
from mimo.config.cli import parse, parse_as, to_toml
from mimo.config.rl_run import DESCRIPTION, RlRunConfig
from mimo.protocols import LANGUAGE
from tests.support import single_model

FLAGS = "--model-provider causal_lm --train-iters 3 --dataset-provider arithmetic --vocab-size 100".split()


def test_flags_of_another_program_are_no_differences():
    supervised = to_toml(parse([*FLAGS, "--lr", "2e-4"]))
    found = config_differences(supervised, parse_as(RlRunConfig, [*FLAGS, "--lr", "1e-4"], DESCRIPTION))
    assert found == ["--lr 0.0001 (checkpoint: 0.0002)"]


def test_a_value_of_0_is_not_one_that_is_not_set():
    unset, zero = (to_toml(parse([*FLAGS, *more])) for more in ((), ("--encoder-weight-decay", "0")))
    assert config_differences(unset, parse([*FLAGS, "--encoder-weight-decay", "0"])) == [
        "--encoder-weight-decay 0.0 (checkpoint: not set)"]
    assert config_differences(zero, parse(FLAGS)) == ["--encoder-weight-decay not set (checkpoint: 0.0)"]
    assert config_differences(unset, parse(FLAGS)) == []


def test_flags_of_a_start_are_no_differences_and_those_of_a_model_are():
    before = to_toml(parse([*FLAGS, "--run-dir", "here"]))
    assert config_differences(before, parse([*FLAGS, "--run-dir", "there", "--num-layers", "7"])) == [
        "--num-layers 7 (checkpoint: 32)"]


@pytest.mark.parametrize("path", ["there", ""])
def test_the_weights_that_a_model_started_from_are_no_difference(path: str):
    """The flag of a family of one's own, which `computed_fields` does not know."""
    provider = single_model.mock_provider
    saved = model_fields(provider, single_model.Config(load_single_checkpoint="here"))
    now = single_model.Config(load_single_checkpoint=path, norm_epsilon=0.5)
    assert model_differences(saved, provider, now, ["vision", LANGUAGE]) == {
        "norm_epsilon": (0.5, saved["norm_epsilon"])}


def test_bad_samples_go_on_from_a_checkpoint_and_from_0_where_it_does_not_tell() -> None:
    common = {"iteration": 5, "consumed_samples": 80, "skipped_iterations": 1, "bad_samples": 7, "passed_samples": 90}
    assert Progress.of(common) == Progress(5, 80, 1, 7, 90, 5)
    del common["bad_samples"]
    assert Progress.of(common) == Progress(5, 80, 1, 0, 90, 5)


def test_samples_of_all_iterations_follow_from_the_batch_size_where_a_checkpoint_does_not_tell() -> None:
    common = {"iteration": 5, "consumed_samples": 80, "skipped_iterations": 1,
              "config": "[train]\nglobal-batch-size = 20\n"}
    assert Progress.of(common) == Progress(5, 80, 1, 0, 100, 5)


@pytest.mark.parametrize("evaluated", [0, 4, None])
def test_no_evaluation_is_missing_where_a_checkpoint_does_not_tell(evaluated: int | None) -> None:
    common = {"iteration": 5, "consumed_samples": 80, "skipped_iterations": 1, "passed_samples": 90}
    common |= {} if evaluated is None else {"evaluated_iteration": evaluated}
    assert Progress.of(common).evaluated_iteration == (5 if evaluated is None else evaluated)


def test_imported_weights_are_of_no_run() -> None:
    assert Progress.of(weights_only_state(["language"], "", {})) == Progress()


def test_a_file_of_sizes_may_change_or_go_while_the_run_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", "rope_theta": 5e5}), encoding="utf-8")
    config = parse(["--model-provider", "causal_lm", "--hf-config", str(path)])
    grids: Any = SimpleNamespace(layout=SimpleNamespace(grids={}, num_lanes=1))
    scheduler: Any = SimpleNamespace(state_dict=dict, num_steps=0)
    none: Any = None
    state = RunState(config, grids, none, none, none, scheduler)
    path.unlink()
    assert common_state(state, Progress(), None)["model"]["rotary_base"] == 5e5
