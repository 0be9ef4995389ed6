"""--load and --save: which of them a run starts from."""

from pathlib import Path

import pytest

from mimo.config.cli import parse
from mimo.config.trainer import CheckpointConfig
from mimo.config.validate import validate

FAKE = ["--model-provider", "tests.unit.config.fake_provider:model",
        "--dataset-provider", "tests.unit.config.fake_provider:dataset", "--train-iters", "10"]


@pytest.mark.parametrize(("load", "save", "elsewhere"), [
    ("a", "b", True), ("a", "a/b", True), ("a/b", "a", True), ("a/iter_0000010", "b", True),
    ("a", "./c/../a/", False), ("link", "a", False), ("link/iter_0000010", "a", False), ("a/release", "a", False),
    (None, "a", False), ("a", None, False), (None, None, False),
])
def test_a_run_starts_elsewhere_than_where_it_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load: str | None, save: str | None, elsewhere: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to("a")
    assert CheckpointConfig(load=load, save=save).starts_elsewhere == elsewhere


@pytest.mark.parametrize("load", ["a", "a/iter_0000010"])
def test_fine_tuning_does_not_replace_what_it_began_with(load: str) -> None:
    flags = ["--finetune", "--load", load]
    validate(parse([*FAKE, *flags, "--save", "b"]), 2)
    validate(parse([*FAKE, *flags]), 2)
    with pytest.raises(ValueError, match=f"--finetune with --load {load} and --save a: .*give --save another folder"):
        validate(parse([*FAKE, *flags, "--save", "a"]), 2)


@pytest.mark.parametrize("key", ["seq-length", "seq_length"])
def test_an_allowed_difference_is_the_name_of_a_flag(key: str) -> None:
    config = parse([*FAKE, "--allow-difference", key, "--allow-difference", "seed"])
    validate(config, 2)
    assert config.checkpoint.allowed_differences == {"seq_length", "seed"}
    with pytest.raises(ValueError, match=r"--allow-difference sequence-length: the run has no flag --sequence-length; "
                                         r".*did you mean seq-length or"):
        validate(parse([*FAKE, "--allow-difference", "sequence-length"]), 2)
