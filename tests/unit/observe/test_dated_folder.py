"""The folder of a run without --run-dir."""

from pathlib import Path

import pytest

from mimo.observability import dated_folder
from mimo.observability.dated_folder import is_chosen, make_run_folder, point_latest_to, refuse_latest


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


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
