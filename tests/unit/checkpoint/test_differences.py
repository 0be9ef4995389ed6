"""Flags that differ between a run and the checkpoint it starts from."""

from __future__ import annotations

import pytest

from mimo.checkpoint.differences import config_differences, model_differences, model_fields
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
