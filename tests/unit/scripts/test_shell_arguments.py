"""Arguments with spaces reach the program as they were typed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mimo.config.cli import parse_as
from mimo.config.rl_run import DESCRIPTION, RlRunConfig

ROOT = Path(__file__).parents[3]
SCRIPTS = sorted((ROOT / "scripts").rglob("*.sh"))
# What is in quotes keeps arguments apart, and so does ${name[@]+"${name[@]}"}; a message in quotes may join them.
QUOTED = re.compile(r'"[^"\n]*"|\'[^\'\n]*\'')
SPLIT = re.compile(r"\$([@*]|\{[@*]|\{\w+\[[@*]\](?!\+))")


def split_arguments(text: str) -> list[str]:
    """Lines that hand on arguments unquoted, comments left out."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    return [line for line in lines if SPLIT.search(QUOTED.sub("", line))]


@pytest.mark.parametrize("line", ["run $@", "run ${flags[@]}", "run $*", "run ${@:2}", 'echo "a b" $@'])
def test_the_check_sees_what_splits(line):
    assert split_arguments(f"# $@\n{line}\n") == [line]


def test_no_script_splits_arguments():
    """Bug 8: `python train.py $@` makes two arguments of `--run-dir "my runs"`."""
    assert len(SCRIPTS) > 5
    assert {path.name: split_arguments(path.read_text()) for path in SCRIPTS if split_arguments(path.read_text())} == {}


def test_a_flag_with_spaces_is_one_value():
    config = parse_as(RlRunConfig, ["--run-dir", "my runs", "--tokenizer", "a b:*"], DESCRIPTION)
    assert (config.observe.run_dir, config.dataset.tokenizer) == ("my runs", "a b:*")
