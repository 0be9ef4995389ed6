"""Whatever is wrong with a checkpoint is refused, by name, and nothing in it is ever run."""

from __future__ import annotations

import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from mimo.checkpoint.load import _whole_one_before
from tests.support.damage import (
    CHECKSUMS,
    COMMON,
    INDEX,
    Change,
    add_tensor,
    delete,
    drop_piece,
    flip,
    is_object,
    items_of,
    lose_place,
    move_piece,
    notes_after,
    plant,
    read_index,
    recast,
    refusals,
    remove,
    rename,
    reshape,
    store,
    tensors_of,
    truncate,
    write,
)
from tests.support.resuming import refusal, train
from tests.support.spawn import WorkerPool

FLAGS = ("--layout", "colocated", "--bf16", "--num-layers", "1", "--vision-num-layers", "1")
TWO_RANKS = ("--encoder-tp", "2", "--llm-dp", "2", "--global-batch-size", "4")
MISSING, CLASH = "missing in the checkpoint", "of another shape or dtype"
LEFT, GAPS = "in the checkpoint, but not in this run", "incomplete in the checkpoint"

# Of the tensors, whose order is that of modules and optimizer states, the fast suite changes every seventh.
EVERY = [7, pytest.param(1, marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def checkpoint(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint with weights, fp32 copies, moments, generators and data streams."""
    root = tmp_path_factory.mktemp("strict")
    pool.run(train, (*FLAGS, "--save", str(root)), 1, 2, world_size=1)
    return root / "iter_0000002"


@pytest.fixture(scope="module")
def split_checkpoint(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of two ranks, which split or share every tensor."""
    root = tmp_path_factory.mktemp("split")
    pool.run(train, (*FLAGS, *TWO_RANKS, "--save", str(root)), 2, 2, world_size=2)
    return root / "iter_0000002"


def errors_of(pool: WorkerPool, folder: Path, changes: list[Change], *flags: str) -> list[str]:
    """Return the error of loading after each change, on one process. Fail if a load succeeds."""
    found: list[str | None] = pool.run(refusals, (*FLAGS, *flags), 1, folder, changes, world_size=1)[0]
    loaded = [change for change, message in zip(changes, found, strict=True) if message is None]
    assert not loaded, f"loaded: {loaded}"
    return [message for message in found if message is not None]


def listed(message: str) -> dict[str, list[str]]:
    """Return the lines of an error by title."""
    found: dict[str, list[str]] = {}
    for line in message.splitlines()[1:]:
        title = re.fullmatch(r"(.*) \(\d+\):", line)
        if title:
            names = found[title.group(1)] = []
        else:
            names.append(line.strip())
    return found


@pytest.mark.slow
def test_a_whole_checkpoint_loads(pool: WorkerPool, checkpoint: Path, split_checkpoint: Path) -> None:
    for folder in (checkpoint, split_checkpoint):
        assert pool.run(refusals, FLAGS, 1, folder, [unchanged], world_size=1) == [[None]]
    kinds = {key.split(".")[0] if not key.startswith("mimo.") else key.split(".")[4] for key in tensors_of(checkpoint)}
    assert kinds == {"vision", "language", "exp_avg", "exp_avg_sq", "fp32_param"}
    pieces = [len(tensor.chunks) for tensor in tensors_of(split_checkpoint).values()]
    assert max(pieces) >= 2, "tensors are stored in pieces"


def unchanged(folder: Path) -> None:
    """No change."""


@pytest.mark.parametrize("step", EVERY)
def test_every_corrupted_item_is_named(pool: WorkerPool, checkpoint: Path, step: int) -> None:
    """Change one byte of each stored item: tensors of model and optimizers, generators, data streams."""
    items = items_of(checkpoint)
    assert {item.fqn for item in items} == set(read_index(checkpoint).state_dict_metadata)
    objects = [item for item in items if is_object(checkpoint, item)]
    items = [*objects, *[item for item in items if item not in objects][::step]]
    for item, message in zip(items, errors_of(pool, checkpoint, [partial(flip, item) for item in items]), strict=True):
        assert f"{item.fqn} in __0_" in message and message.count("(checksum)") == 1, message


@pytest.mark.slow
def test_every_corrupted_piece_is_named_on_every_rank(pool: WorkerPool, split_checkpoint: Path) -> None:
    items = items_of(split_checkpoint)[::7]
    flags, changes = (*FLAGS, *TWO_RANKS), [partial(flip, item) for item in items]
    by_rank = pool.run(refusals, flags, 2, split_checkpoint, changes, world_size=2)
    for item, messages in zip(items, zip(*by_rank, strict=True), strict=True):
        assert sorted(message is not None and item.fqn in message for message in messages) == [False, True], messages
        assert "" in messages, "one rank speaks, the other leaves too"


@pytest.mark.parametrize("step", EVERY)
def test_every_deleted_tensor_is_named(pool: WorkerPool, checkpoint: Path, step: int) -> None:
    keys = list(tensors_of(checkpoint))[::step]
    for key, message in zip(keys, errors_of(pool, checkpoint, [partial(delete, key) for key in keys]), strict=True):
        assert listed(message) == {MISSING: [key]}


@pytest.mark.slow
def test_renamed_tensors_are_named(pool: WorkerPool, checkpoint: Path) -> None:
    keys = list(tensors_of(checkpoint))[::3]
    changes = [partial(rename, key, f"{key}_2") for key in keys]
    for key, message in zip(keys, errors_of(pool, checkpoint, changes), strict=True):
        assert listed(message) == {MISSING: [key], LEFT: [f"{key}_2"]}


@pytest.mark.slow
def test_reshaped_tensors_are_named(pool: WorkerPool, checkpoint: Path) -> None:
    tensors = dict(list(tensors_of(checkpoint).items())[::3])
    # Rows beyond the vocabulary are padding, which another layout may have more of.
    messages = errors_of(pool, checkpoint, [partial(reshape, key) for key in tensors])
    for (key, tensor), message in zip(tensors.items(), messages, strict=True):
        size = list(tensor.size)
        bigger = [size[0] + 1, *size[1:]]
        found = listed(message)
        assert found[GAPS] == [f"{key}: its pieces leave something out or overlap"]
        if "word_embeddings" not in key and "output_layer" not in key:
            assert found[CLASH] == [f"{key}: shape {bigger} in the checkpoint, {size} in this run"]


@pytest.mark.slow
def test_recast_tensors_are_named(pool: WorkerPool, checkpoint: Path) -> None:
    tensors = dict(list(tensors_of(checkpoint).items())[::3])
    messages = errors_of(pool, checkpoint, [partial(recast, key) for key in tensors])
    for (key, tensor), message in zip(tensors.items(), messages, strict=True):
        assert listed(message) == {
            CLASH: [f"{key}: torch.float16 in the checkpoint, {tensor.properties.dtype} in this run"]}


@pytest.mark.slow
def test_every_lost_or_moved_piece_is_named(pool: WorkerPool, split_checkpoint: Path) -> None:
    keys = [key for key, tensor in tensors_of(split_checkpoint).items() if len(tensor.chunks) > 1]
    assert len(keys) > 10
    changes: list[Change] = [change for key in keys for change in (partial(drop_piece, key), partial(move_piece, key))]
    messages = errors_of(pool, split_checkpoint, changes)
    for key, first, second in zip(keys, messages[::2], messages[1::2], strict=True):
        gap = {GAPS: [f"{key}: its pieces leave something out or overlap"]}
        assert listed(first) == gap and listed(second) == gap


@pytest.mark.slow
def test_items_without_a_place_are_named(pool: WorkerPool, checkpoint: Path) -> None:
    items = items_of(checkpoint)[::5]
    messages = errors_of(pool, checkpoint, [partial(lose_place, item) for item in items])
    for item, message in zip(items, messages, strict=True):
        assert f"{item.fqn}: the index does not say where a piece of it is" in message


@pytest.mark.slow
def test_lost_objects_are_noted(pool: WorkerPool, checkpoint: Path) -> None:
    """Generators and data streams depend on the layout, so that they may be missing; but not in silence."""
    objects = sorted(item.fqn for item in items_of(checkpoint) if is_object(checkpoint, item))
    generators = [name for name in objects if "rng_state" in name]
    streams = [name for name in objects if "loader" in name]
    assert len(generators) == len(streams) == 2
    changes = [partial(delete_all, keys) for keys in (generators[:1], generators, streams[:1], streams)]
    one, both, stream, no_stream = pool.run(notes_after, FLAGS, 1, checkpoint, changes, world_size=1)[0]
    assert len(one) == len(both) == len(no_stream) == 1 and stream == [], "all streams stand at one place"
    assert "generators of language start" in one[0] and "generators of vision, language start" in both[0]
    assert "the data starts at its beginning" in no_stream[0]


def delete_all(keys: list[str], folder: Path) -> None:
    for key in keys:
        delete(key, folder)


@pytest.mark.slow
def test_unknown_modules_are_named(pool: WorkerPool, checkpoint: Path) -> None:
    keys = ["audio.encoders.weight", "mimo.audio.optimizer.state.exp_avg.encoders.weight", "language.more.weight",
            "mimo.vision.optimizer.state.exp_avg.more.weight"]
    for key, message in zip(keys, errors_of(pool, checkpoint, [partial(add_tensor, key) for key in keys]), strict=True):
        assert listed(message) == {LEFT: [key]}


@pytest.mark.slow
def test_another_size_lists_every_clash_at_once(pool: WorkerPool, checkpoint: Path) -> None:
    """Both modules, weights and optimizer, in one error; nothing else is done."""
    flags = ("--ffn-hidden-size", "48", "--vision-ffn-hidden-size", "96", "--num-layers", "2", "--no-bf16",
             *(word for key in ("ffn-hidden-size", "vision-ffn-hidden-size", "num-layers")
               for word in ("--allow-difference", key)))
    found = listed(errors_of(pool, checkpoint, [unchanged], *flags)[0])
    assert found.keys() == {CLASH, LEFT}
    clashes = "\n".join(found[CLASH])
    for part in ("language.decoder.layers.mlp.linear_fc1.weight: shape", "torch.bfloat16 in the checkpoint",
                 "[1, 64, 32] in the checkpoint"):
        assert part in clashes, clashes
    assert all("fp32_param" in key for key in found[LEFT]), "a float32 run has no copies"


@pytest.mark.slow
def test_damaged_files_are_named(pool: WorkerPool, checkpoint: Path) -> None:
    shards = sorted(path.name for path in checkpoint.glob("*.distcp"))
    held = {name: {item.fqn for item, place in read_index(checkpoint).storage_data.items()
                   if place.relative_path == name} for name in shards}
    for name in shards:
        missing, cut = errors_of(pool, checkpoint, [partial(remove, name), partial(truncate, name, 10)])
        assert f"{name} cannot be read" in missing and all(key in missing for key in held[name])
        assert f"in {name}: the file ends 10 bytes early" in cut
    files = [partial(remove, INDEX), partial(truncate, INDEX, 10), partial(write, INDEX, b""), partial(remove, COMMON),
             partial(truncate, COMMON, 10), partial(write, COMMON, b"no zip"), partial(truncate, CHECKSUMS, 10)]
    for change, message in zip(files, errors_of(pool, checkpoint, files), strict=True):
        assert change.args[0] in message, message


@pytest.mark.slow
def test_a_checkpoint_without_its_checksums_is_not_trusted(pool: WorkerPool, checkpoint: Path) -> None:
    changes: list[Change] = [partial(remove, CHECKSUMS), partial(write, CHECKSUMS, b"{}")]
    gone, empty = errors_of(pool, checkpoint, changes)
    assert f"{CHECKSUMS} is missing" in gone and "--no-ckpt-verify" in gone
    assert f"{COMMON} is damaged" in empty
    assert pool.run(refusals, (*FLAGS, "--no-ckpt-verify"), 1, checkpoint, changes[:1], world_size=1) == [[None]]


@pytest.mark.slow
def test_weights_that_are_not_finite_are_named(pool: WorkerPool, checkpoint: Path) -> None:
    key = "language.decoder.final_layernorm.weight"
    item = next(item for item in items_of(checkpoint) if item.fqn == key)
    (message,) = errors_of(pool, checkpoint, [partial(store, item, not_a_number)])
    assert message == f"{checkpoint}: values that are NaN or infinite in {key}"


def not_a_number(value: torch.Tensor) -> torch.Tensor:
    return value * torch.nan


@pytest.mark.slow
def test_the_newest_whole_checkpoint_before_a_damaged_one_is_named(pool, checkpoint, tmp_path):
    for step in (1, 2, 3, 4):
        shutil.copytree(checkpoint, tmp_path / f"iter_000000{step}")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("4")
    item = items_of(checkpoint)[0]
    flip(item, tmp_path / "iter_0000004")
    remove(COMMON, tmp_path / "iter_0000003")
    flags = (*FLAGS, "--load", str(tmp_path))
    hint = f"The newest whole checkpoint before it is that of iteration {{}}: give --load {tmp_path} --ckpt-step {{}}"
    for more, step in (((), 2), (("--ckpt-step", "3"), 2)):
        (message,) = pool.run(refusal, (*flags, *more), 1, world_size=1)
        assert message is not None and message.endswith(hint.format(step, step)), message
    of_reference = _whole_one_before(tmp_path / "iter_0000004", "--ref-load")
    assert of_reference.endswith(f"of iteration 2: give --ref-load {tmp_path / 'iter_0000002'}")
    for step in (1, 2):
        flip(item, tmp_path / f"iter_000000{step}")
    (message,) = pool.run(refusal, flags, 1, world_size=1)
    assert message is not None and message.endswith(f"There is no whole checkpoint before it in {tmp_path}")


def test_no_code_of_a_checkpoint_is_run(pool: WorkerPool, checkpoint: Path, tmp_path: Path) -> None:
    objects = [item for item in items_of(checkpoint) if is_object(checkpoint, item)]
    tensors = [item for item in items_of(checkpoint) if not is_object(checkpoint, item)]
    assert any("rng_state" in item.fqn for item in objects) and any("loader" in item.fqn for item in objects)
    places: list[Any] = [INDEX, COMMON, *objects, tensors[0], tensors[-1]]
    changes = [partial(plant, where, str(tmp_path / f"ran{number}")) for number, where in enumerate(places)]
    for flags in ((), ("--no-ckpt-verify",)):
        for where, message in zip(places, errors_of(pool, checkpoint, list(changes), *flags), strict=True):
            name = where if isinstance(where, str) else where.fqn
            assert name in message and "mkdir" in message, message
    assert not list(tmp_path.iterdir()), "code was run"
    plant(COMMON, str(tmp_path / "armed"), checkpoint_copy(checkpoint, tmp_path))
    torch.load(tmp_path / "copy" / COMMON, weights_only=False)
    assert (tmp_path / "armed").is_dir(), "the bombs are live"


def checkpoint_copy(checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / "copy"))


@pytest.mark.slow
def test_fp32_copies_that_are_not_the_weights(pool: WorkerPool, checkpoint: Path) -> None:
    """A consistent checkpoint of inconsistent values: the first step would jump to the copy."""
    start = "mimo.language.optimizer.state.fp32_param."
    items = [item for item in items_of(checkpoint) if item.fqn.startswith(start)]
    for item in items[:3]:
        name = item.fqn.removeprefix(start)
        change = partial(store, item, add_a_quarter)
        (message,) = errors_of(pool, checkpoint, [change])
        assert f"copies of the optimizer: language: {name};" in message
        assert pool.run(refusals, (*FLAGS, "--no-load-optim"), 1, checkpoint, [change], world_size=1) == [[None]]


def add_a_quarter(value: torch.Tensor) -> torch.Tensor:
    return value + 0.25


@pytest.mark.slow
def test_the_tracker_is_checked(pool: WorkerPool, checkpoint: Path, tmp_path: Path) -> None:
    root, tracker = tmp_path, tmp_path / "latest_checkpointed_iteration.txt"
    (root / "iter_0000003").mkdir()
    checkpoint_copy(checkpoint, tmp_path).rename(root / "iter_0000002")
    flags = (*FLAGS, "--load", str(root))
    for content, parts in ((b"7", [f"{tracker} names iter_0000007, which is not there", "complete: 2"]),
                           (b"3", [f"{tracker} names iter_0000003, which is not complete", "complete: 2"]),
                           (b"release", [f"{tracker} names release, which is not there"]),
                           (b"", [f"{tracker} holds ''", "(2)"]),
                           (b"two", [f"{tracker} holds 'two'"]),
                           (b"-2", [f"{tracker} holds '-2'"]),
                           (b"\xff\xfe\x00", [f"{tracker} holds"])):
        tracker.write_bytes(content)
        message = pool.run(refusal, flags, 1, world_size=1)[0]
        assert message is not None and all(part in message for part in parts), message
    tracker.write_bytes(b"2\n")
    assert pool.run(refusal, flags, 1, world_size=1) == [None]
    tracker.unlink()
    assert pool.run(refusal, flags, 1, world_size=1) == [None]
