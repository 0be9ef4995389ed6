"""Folders of weights for engines elsewhere: what is complete, what is damaged, what is deleted."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from mimo.refit.rendezvous import RefitError
from mimo.refit.tensor_slices import TensorMeta
from mimo.refit.transport import disk as manifest
from mimo.refit.transport.disk import Manifest, read_manifest, wait_for_weights, write_manifest

ENTRIES = (TensorMeta("a.weight", "bfloat16", (4, 2)), TensorMeta("a.bias", "float32", (4,), keep_fp32=True))
SPELLINGS = [{"module": "language", "first": 0, "count": 2, "styles": {"own": ["a.weight", "a.bias"]}}]


def written(root: Path, version: str, complete: bool = True) -> Path:
    folder = manifest.next_subfolder(root)
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"12345678")
    if complete:
        write_manifest(folder, Manifest(version, ENTRIES, SPELLINGS, {"model.safetensors": 8}))
    return folder


def test_a_manifest_comes_back_as_it_was(tmp_path: Path) -> None:
    found = read_manifest(written(tmp_path, "step 1"))
    assert found == Manifest("step 1", ENTRIES, SPELLINGS, {"model.safetensors": 8})
    assert [path.name for path in tmp_path.iterdir()] == ["weights_0000001"]


def test_the_sequence_is_that_of_names_dtypes_and_shapes_in_order() -> None:
    def sequence(entries: tuple[TensorMeta, ...], version: str = "1") -> str:
        return Manifest(version, entries, SPELLINGS, {}).sequence()

    weight, bias = ENTRIES
    own = sequence(ENTRIES)
    assert own == sequence(ENTRIES, "2")
    others = [(bias, weight), (weight,), (TensorMeta("b.weight", *("bfloat16", (4, 2))), bias),
              (TensorMeta("a.weight", "float32", (4, 2)), bias), (TensorMeta("a.weight", "bfloat16", (2, 4)), bias),
              (weight, TensorMeta("a.bias", "float32", (4,)))]
    assert own not in {sequence(entries) for entries in others}


@pytest.mark.parametrize(("change", "error"), [
    (lambda text: text[:len(text) // 2], "damaged"), (lambda text: "", "damaged"),
    (lambda text: "[]", "not a manifest"),
    (lambda text: text.replace("step 1", "step 2"), "checksum"), (lambda text: text.replace("[4, 2]", "[2, 4]", 1),
                                                                  "checksum"),
    (lambda text: json.dumps({**json.loads(text), "format": 2}), "format 1")])
def test_a_damaged_manifest_is_named(tmp_path: Path, change: object, error: str) -> None:
    assert callable(change)
    path = written(tmp_path, "step 1") / manifest.MANIFEST
    path.write_text(change(path.read_text()))
    with pytest.raises(RefitError, match=error) as raised:
        read_manifest(path.parent)
    assert str(path) in str(raised.value)
    with pytest.raises(RefitError, match=error):
        wait_for_weights(tmp_path, None, 5)


def test_the_newest_complete_version_is_taken(tmp_path: Path) -> None:
    folders = [written(tmp_path, f"step {number}", complete=number < 3) for number in range(1, 4)]
    assert wait_for_weights(tmp_path, None, 5) == folders[1]
    assert wait_for_weights(tmp_path, "step 1", 5) == folders[0]


def test_an_error_after_the_timeout_describes_the_folder(tmp_path: Path) -> None:
    for made, told in ((lambda: None, "no such folder"), (lambda: (tmp_path / "w").mkdir(), "no trainer has written"),
                       (lambda: written(tmp_path / "w", "", complete=False), "weights_0000001 has no refit_manifest"),
                       (lambda: written(tmp_path / "w", "b"), "weights_0000002 has version 'b'")):
        made()
        with pytest.raises(RefitError, match=told):
            wait_for_weights(tmp_path / "w", "a", 0)


def test_weights_that_come_later_are_waited_for(tmp_path: Path) -> None:
    folder = written(tmp_path, "", complete=False)

    def finish() -> None:
        time.sleep(0.2)
        write_manifest(folder, Manifest("late", ENTRIES, SPELLINGS, {}))

    thread = threading.Thread(target=finish)
    thread.start()
    assert wait_for_weights(tmp_path, "late", 30) == folder
    thread.join()


def test_old_and_unfinished_versions_are_deleted(tmp_path: Path) -> None:
    folders = [written(tmp_path, str(number), complete=number not in (2, 4, 6)) for number in range(1, 7)]
    other = tmp_path / "notes"
    other.mkdir()
    manifest.prune(tmp_path, 2)
    # The last is being written by now.
    assert manifest.subfolders(tmp_path) == [folders[2], folders[4], folders[5]]
    assert other.is_dir()
    assert manifest.next_subfolder(tmp_path).name == "weights_0000007"
