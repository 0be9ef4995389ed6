"""The folder of checkpoints: names, tracker, what is kept, and what an interruption at any moment leaves."""

from __future__ import annotations

import errno
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from mimo.checkpoint import paths


class Interrupted(Exception):
    """The process ends here."""


def save(root: Path, iteration: int, content: str, keep_last: int | None = None) -> Path:
    """Write a checkpoint of one file and publish it."""
    folder = paths.begin(root, iteration)
    (folder / "weights").write_text(content)
    (folder / paths.METADATA).write_text("{}")
    return paths.publish(root, iteration, keep_last)


def loaded(root: Path) -> str:
    """Content of the checkpoint that a run would go on from."""
    folder = paths.find(root, None)
    assert folder is not None
    assert sorted(path.name for path in folder.iterdir()) == [paths.METADATA, "weights"], "not whole"
    return (folder / "weights").read_text()


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_names_are_megatrons(tmp_path: Path) -> None:
    root = tmp_path / "deep" / "er"
    assert save(root, 10, "ten") == root / "iter_0000010"
    assert names(root) == ["iter_0000010", "latest_checkpointed_iteration.txt"]
    assert (root / "latest_checkpointed_iteration.txt").read_text() == "10"
    assert paths.iteration_dir(root, 12345678).name == "iter_12345678"
    save(root, 12345678, "many")
    assert paths.saved_iterations(root) == [10, 12345678]


def test_only_complete_checkpoints_count(tmp_path: Path) -> None:
    save(tmp_path, 2, "two")
    paths.begin(tmp_path, 4)
    for name in ("iter_0000006", "iter_12", "iter_0000008_old", "release"):
        (tmp_path / name).mkdir()
    (tmp_path / "iter_0000008_old" / paths.METADATA).write_text("{}")
    (tmp_path / "iter_12" / paths.METADATA).write_text("{}")
    assert paths.saved_iterations(tmp_path) == [2]
    assert loaded(tmp_path) == "two"
    assert paths.find(tmp_path, 2) == paths.find(tmp_path / "iter_0000002", None) == tmp_path / "iter_0000002"
    for step, reason in ((6, "is not complete, it has no metadata.json"), (4, "is not there")):
        message = f"--ckpt-step {step} names iter_000000{step}, which {reason}; complete: 2"
        with pytest.raises(ValueError, match=message):
            paths.find(tmp_path, step)


def test_a_step_and_a_checkpoints_own_folder_agree(tmp_path: Path) -> None:
    folder = save(tmp_path, 2, "two")
    assert paths.find(folder, 2) == folder
    with pytest.raises(ValueError, match=f"--load {folder} is one checkpoint's own folder, which is not called "
                                         "iter_0000004: leave out --ckpt-step 4, or"):
        paths.find(folder, 4)


@pytest.mark.parametrize(("keep_last", "kept"), [(1, [8]), (2, [6, 8]), (3, [4, 6, 8]), (9, [2, 4, 6, 8]),
                                                 (None, [2, 4, 6, 8])])
def test_keep_last(tmp_path: Path, keep_last: int | None, kept: list[int]) -> None:
    for iteration in (2, 4, 6, 8):
        save(tmp_path, iteration, str(iteration), keep_last)
    assert paths.saved_iterations(tmp_path) == kept
    assert names(tmp_path) == [f"iter_{iteration:07d}" for iteration in kept] + [paths.TRACKER]


def test_the_new_checkpoint_is_kept_among_later_ones(tmp_path: Path) -> None:
    """Iterations of an abandoned run may be higher after --ckpt-step went back."""
    save(tmp_path, 8, "eight")
    save(tmp_path, 4, "four", keep_last=1)
    assert loaded(tmp_path) == "four" and paths.saved_iterations(tmp_path) == [4, 8]


def test_an_abandoned_future_is_neither_counted_nor_deleted(tmp_path, caplog):
    for iteration in (50, 60, 70, 80):
        save(tmp_path, iteration, "abandoned")
    kept = []
    for iteration in (55, 60, 65, 75, 90):
        save(tmp_path, iteration, str(iteration), keep_last=2)
        assert loaded(tmp_path) == str(iteration)
        kept.append(paths.saved_iterations(tmp_path))
    assert kept == [[50, 55, 60, 70, 80], [55, 60, 70, 80], [60, 65, 70, 80], [70, 75, 80], [80, 90]]
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}: checkpoints of iterations 60, 70, 80 are later than 55, the latest of this run: --keep-last "
        "neither counts nor deletes them"]


def cannot_delete(patch: pytest.MonkeyPatch, *busy: str) -> None:
    """Files of these names cannot be removed: they are open somewhere, as NFS's .nfs files."""
    real = os.unlink

    def unlink(path: Any, *args: Any, **kwargs: Any) -> None:
        if Path(os.fspath(path)).name in busy:
            raise OSError(errno.EBUSY, "Device or resource busy", os.fspath(path))
        real(path, *args, **kwargs)

    patch.setattr(os, "unlink", unlink)


def test_a_failed_deletion_does_not_end_a_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Surplus, replaced and unfinished checkpoints: a warning each, once, and every save is complete."""
    for iteration in (2, 4):
        save(tmp_path, iteration, str(iteration))
    (paths.begin(tmp_path, 6) / "weights").write_text("half")
    with pytest.MonkeyPatch.context() as patch:
        cannot_delete(patch, "weights")
        save(tmp_path, 4, "4 again")
        for iteration in (6, 8):
            save(tmp_path, iteration, str(iteration), keep_last=1)
            assert loaded(tmp_path) == str(iteration) and paths.saved_iterations(tmp_path) == [iteration]
        # Deleted once more, as no remains of the first are in the way or come back as a checkpoint.
        for content in ("8 again", "8 once more"):
            save(tmp_path, 8, content)
            assert loaded(tmp_path) == content
        assert paths.find(tmp_path, None) == tmp_path / "iter_0000008"
    remains = [f".deleted_iter_000000{name}" for name in ("2", "4", "4.1", "6", "6.1", "8", "8.1")]
    assert names(tmp_path) == [*remains, "iter_0000008", paths.TRACKER]
    messages = [record.getMessage() for record in caplog.records]
    assert sorted(message.split(" could not be deleted: OSError: [Errno 16] ")[0] for message in messages) == [
        str(tmp_path / name) for name in remains]
    save(tmp_path, 10, "10", keep_last=1)
    assert names(tmp_path) == ["iter_0000010", paths.TRACKER]


def test_others_may_delete_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Somebody's cron removes a surplus checkpoint at the same moment; or it cannot even be renamed."""
    for iteration in (2, 4):
        save(tmp_path, iteration, str(iteration))
    real = Path.rename

    def rename(self: Path, target: Path) -> Path:
        if self.name == "iter_0000002":
            shutil.rmtree(self)
        if self.name == "iter_0000004":
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        return real(self, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "rename", rename)
        for iteration in (6, 8):
            save(tmp_path, iteration, str(iteration), keep_last=1)
            assert loaded(tmp_path) == str(iteration)
    assert paths.saved_iterations(tmp_path) == [4, 8]
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}/iter_0000004 could not be deleted: PermissionError: [Errno 13] Permission denied: "
        f"'{tmp_path}/iter_0000004'"]


def test_an_unfinished_folder_that_stays_is_in_the_way_of_its_own_iteration_alone(tmp_path: Path) -> None:
    paths.begin(tmp_path, 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "rename", lambda self, target: (_ for _ in ()).throw(PermissionError(str(self))))
        patch.setattr(shutil, "rmtree", lambda path, **_: (_ for _ in ()).throw(PermissionError(str(path))))
        assert paths.begin(tmp_path, 6).is_dir()
        with pytest.raises(FileExistsError):
            paths.begin(tmp_path, 4)


def test_leftovers_are_removed(tmp_path: Path) -> None:
    save(tmp_path, 2, "two")
    (paths.begin(tmp_path, 4) / "partial").write_text("x")
    assert names(paths.begin(tmp_path, 6)) == []
    assert names(tmp_path) == [".saving_iter_0000006", "iter_0000002", paths.TRACKER]
    paths.discard(tmp_path, 6)
    assert names(tmp_path) == ["iter_0000002", paths.TRACKER]
    paths.discard(tmp_path, 6)


def test_nothing_there(tmp_path: Path) -> None:
    assert paths.find(tmp_path, None) is None and paths.find(tmp_path / "nowhere", None) is None
    assert paths.saved_iterations(tmp_path / "nowhere") == []
    with pytest.raises(ValueError, match="--ckpt-step 3 names iter_0000003, which is not there; complete: none"):
        paths.find(tmp_path, 3)


def test_release_is_a_checkpoint_too(tmp_path: Path) -> None:
    (tmp_path / "release").mkdir()
    (tmp_path / "release" / paths.METADATA).write_text("{}")
    paths.write_tracker(tmp_path, paths.RELEASE)
    assert paths.find(tmp_path, None) == tmp_path / "release"


@pytest.mark.parametrize("content", [b"", b"abc", b"-1", b"1.0", b"1 2", b"\xff\xfe", b"\x00" * 9, "²".encode()])
def test_a_bad_tracker_is_refused(tmp_path: Path, content: bytes) -> None:
    save(tmp_path, 2, "two")
    (tmp_path / paths.TRACKER).write_bytes(content)
    with pytest.raises(ValueError, match=rf"{paths.TRACKER} holds .*complete checkpoint into it \(2\)"):
        paths.find(tmp_path, None)
    assert paths.find(tmp_path, 2) is not None


def count_calls(patch: pytest.MonkeyPatch, stop_at: int) -> list[str]:
    """Interrupt the `stop_at`-th change of the file system; gives the changes made."""
    done: list[str] = []

    def interrupting(target: Any, name: str) -> None:
        real = getattr(target, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if len(done) == stop_at:
                if name == "rmtree":  # half of it
                    next(path for path in Path(args[0]).iterdir()).unlink()
                raise Interrupted
            done.append(name)
            return real(*args, **kwargs)

        patch.setattr(target, name, call)

    for name in ("rename", "replace", "mkdir"):
        interrupting(Path, name)
    interrupting(paths, "write_file")
    interrupting(shutil, "rmtree")
    return done


@pytest.mark.parametrize("again", [False, True], ids=["new-iteration", "same-iteration"])
def test_interrupted_at_any_moment(tmp_path: Path, again: bool) -> None:
    """The old checkpoint loads, or the new one, whole; and the next save works."""
    old, new = ("2", "2 again") if again else ("4", "6")
    outcomes = []
    for moment in range(100):
        root = tmp_path / str(moment)
        for iteration in (2,) if again else (2, 4):
            save(root, iteration, str(iteration))
        with pytest.MonkeyPatch.context() as patch:
            done = count_calls(patch, moment)
            try:
                save(root, 2 if again else 6, new, keep_last=1)
                break
            except Interrupted:
                assert len(done) == moment
        outcomes.append(loaded(root))
        assert outcomes[-1] in (old, new), moment
        save(root, 8, "8", keep_last=2)
        assert loaded(root) == "8"
        assert not [name for name in names(root) if name.startswith(".")]
    assert outcomes == sorted(outcomes, key=(old, new).index) and set(outcomes) == {old, new}, outcomes
    assert len(outcomes) >= (5 if again else 7)


def test_a_publication_that_goes_on_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader finds the new checkpoint, or the old one under its other name if its publication has stopped."""
    final = save(tmp_path, 2, "old")
    (new := paths.begin(tmp_path, 2)).joinpath(paths.METADATA).write_text("{}")
    replaced = final.rename(tmp_path / ".replaced_iter_0000002")
    pauses = list[float]()
    monkeypatch.setattr(time, "sleep", pauses.append)
    assert paths.find(tmp_path, None, repair=False) == paths.find(tmp_path, 2, repair=False) == replaced
    assert sum(pauses) == pytest.approx(2.0) and names(tmp_path)[0] == ".replaced_iter_0000002"
    monkeypatch.setattr(time, "sleep", lambda _: final.exists() or new.rename(final))
    assert paths.find(tmp_path, None, repair=False) == final


def test_writable(tmp_path: Path) -> None:
    paths.check_writable(tmp_path, "rank_0")
    assert names(tmp_path) == []
    with pytest.raises(OSError):
        paths.check_writable(tmp_path / "nowhere", "rank_0")


def test_an_evaluation_is_noted_in_its_checkpoint_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = save(tmp_path, 2, "two")
    paths.mark_evaluated(tmp_path, 2)
    assert (folder / paths.EVALUATED).read_bytes() == b"" and paths.saved_iterations(tmp_path) == [2]
    assert paths.find(tmp_path, None) == folder and not caplog.records
    assert not (save(tmp_path, 2, "again") / paths.EVALUATED).exists(), "the same iteration of another attempt"
    paths.mark_evaluated(tmp_path, 4)
    assert "the evaluation of iteration 4 could not be noted there" in caplog.text
