"""The folder that a run writes into: that of what it goes on from, or one with the date."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mimo import comm
from mimo.checkpoint.load import find_source
from mimo.checkpoint.paths import METADATA, write_tracker
from mimo.config.cli import parse, to_toml
from mimo.config.trainer import RunConfig
from mimo.observability import dated_folder
from mimo.observability.dated_folder import is_chosen, make_run_folder, point_latest_to, refuse_latest
from mimo.training import session

MOCK = ("--model-provider", "mock", "--dataset-provider", "mock")


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def folder_of(*flags: str) -> Path:
    return Path(session._choose(parse([*MOCK, *flags])))


def save(root: str, config: RunConfig) -> None:
    """Leave what a run leaves that says where it wrote."""
    folder = Path(root, "iter_0000010")
    folder.mkdir(parents=True)
    (folder / METADATA).write_text("{}")
    torch.save({"config": to_toml(config), "iteration": 10}, folder / "common.pt")
    write_tracker(Path(root), "10")


def saved(*flags: str) -> Path:
    """Begin a run and save it in `saved`; its folder."""
    folder = folder_of(*flags)
    save("saved", parse([*MOCK, *flags, "--run-dir", str(folder)]))
    return folder


def test_each_run_has_a_folder_of_its_own():
    assert len({folder_of() for _ in range(3)}) == 3
    assert Path("runs/latest").is_symlink()


def test_a_run_goes_on_in_the_folder_of_its_checkpoint():
    first = saved("--save", "saved")
    assert folder_of() != first
    assert folder_of("--load", "saved", "--save", "saved") == first
    assert Path("runs/latest").resolve() == first.resolve(), "the newest is the one under way"
    assert folder_of("--load", "saved") == first
    assert folder_of("--load", "saved", "--run-dir", "named") == Path("named")


def test_a_requeued_run_that_began_elsewhere_goes_on_in_its_own_folder():
    save("start", parse([*MOCK, "--run-dir", "runs/start"]))
    flags = ("--load", "start", "--save", "saved", "--finetune")
    first = saved(*flags)
    assert first.name != "start"
    assert folder_of(*flags) == first


@pytest.mark.parametrize("flags", ["--load saved --save saved", "--load saved --save other",
                                   "--load start --save saved"])
def test_what_another_run_is_saving_is_left_alone_before_the_lock(flags, monkeypatch):
    """A run that the lock will refuse, or that only reads, undoes no publication that is under way."""
    monkeypatch.setattr(time, "sleep", lambda _: None)
    save("start", parse([*MOCK, "--run-dir", "runs/start"]))
    first = saved("--load", "start", "--save", "saved")
    Path("saved/iter_0000010").rename("saved/.replaced_iter_0000010")
    assert (folder_of(*flags.split()) == first) == ("other" not in flags)
    config = parse([*MOCK, *flags.split()]).checkpoint
    assert find_source(config, Path(str(config.load)), repair=False) is not None
    assert [path.name for path in Path("saved").glob("*iter_*")] == [".replaced_iter_0000010"]
    source = find_source(config, Path(str(config.load)), repair=True)
    assert source is not None
    repaired = "saved/iter_0000010" if "other" not in flags else "saved/.replaced_iter_0000010"
    assert source.folder == Path(repaired) and source.folder.is_dir(), "the owner of the lock repairs its own folder"


@pytest.mark.parametrize("flags", ["--save other", "--finetune", "--finetune --save other"])
def test_a_run_that_only_starts_from_a_checkpoint_has_a_folder_of_its_own(flags):
    first = saved("--save", "saved")
    assert folder_of("--load", "saved", *flags.split()) != first


def test_a_folder_that_is_gone_is_made_again_and_that_is_said(caplog):
    first = saved("--save", "saved")
    first.rmdir()
    assert folder_of("--load", "saved", "--save", "saved") == first and first.is_dir()
    assert f"{first}, the run's folder according to its checkpoint, is not there" in caplog.text


def test_checkpoints_of_earlier_versions_name_what_is_now_a_link():
    save("saved", parse([*MOCK, "--run-dir", "runs/latest"]))
    assert folder_of("--load", "saved", "--save", "saved") != Path("runs/latest"), "that would never be a link"
    other = folder_of()
    assert folder_of("--load", "saved", "--save", "saved") not in (other, Path("runs/latest"))


def test_the_first_rank_decides_and_run_config_toml_can_be_used_again(monkeypatch):
    monkeypatch.setattr(comm, "broadcast_object", lambda grids, value: value if value[0] else ("runs/of-rank-0", None))
    config = parse(list(MOCK))
    assert session.with_run_folder(config, SimpleNamespace(rank=1)).observe.run_dir == "runs/of-rank-0"
    chosen = session.with_run_folder(config, SimpleNamespace(rank=0))
    assert Path(chosen.observe.run_dir).is_dir() and session.without_chosen_folder(chosen) == config
    named = parse([*MOCK, "--run-dir", "named"])
    assert session.without_chosen_folder(named) == named


def test_runs_of_one_second_have_folders_of_their_own(monkeypatch):
    monkeypatch.setattr(dated_folder.time, "strftime", lambda form: "20260102-030405")
    folders = [make_run_folder("llava", "own_data.sums:provider") for _ in range(3)]
    names = [f"20260102-030405-llava-sums{end}" for end in ("", "-2", "-3")]
    assert folders == [Path("runs", name) for name in names]
    assert all(is_chosen(str(folder)) for folder in folders)
    assert not is_chosen("runs/quickstart") and not is_chosen("elsewhere/20260102-030405-llava-sums")


def test_latest_is_a_link_to_the_newest():
    for name in ("first", "second"):
        folder = make_run_folder(name)
        assert point_latest_to(folder) is None
        assert Path("runs/latest").is_symlink() and Path("runs/latest").resolve() == folder.resolve()
    assert sorted(path.name.rpartition("-")[2] for path in Path("runs").iterdir()) == ["first", "latest", "second"]


def test_a_real_folder_called_latest_stays():
    Path("runs/latest").mkdir(parents=True)
    Path("runs/latest/metrics.jsonl").write_text("kept")
    assert "runs/latest is a folder of an earlier run and stays" in str(point_latest_to(make_run_folder("mock")))
    assert Path("runs/latest/metrics.jsonl").read_text() == "kept"


def test_the_link_is_no_folder_for_another_run():
    folder = make_run_folder("mock")
    point_latest_to(folder)
    with pytest.raises(ValueError, match=f"--run-dir runs/latest is a link to the folder of .*, {folder.name}: leave"):
        refuse_latest("runs/latest")
    refuse_latest(str(folder))
