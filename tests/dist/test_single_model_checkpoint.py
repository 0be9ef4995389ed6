"""A checkpoint of the whole model, written by Megatron Core, starts any layout, and nothing is left out."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch

from mimo.config.validate import validate
from tests.support import deepseek, single_model
from tests.support.damage import (
    INDEX,
    Change,
    add_tensor,
    delete,
    drop_piece,
    items_of,
    plant,
    read_index,
    recast,
    remove,
    rename,
    reshape,
    tensors_of,
)
from tests.support.equality import MOE
from tests.support.single_model import (
    FLAG,
    MOCK,
    NEMOTRON,
    NEMOTRON_TEXT,
    TEXT,
    load_and_step,
    names_of_both,
    refusals,
    resize,
    start_lines,
    unchanged,
    write,
)
from tests.support.spawn import WorkerPool

PADDING = ("--vocab-size", "90", "--image-token-id", "89", "--make-vocab-size-divisible-by")
# Model -> flags of the run that wrote it, and of `write`.
MODELS: dict[str, tuple[tuple[str, ...], bool, str]] = {"dense": ((*MOCK, *PADDING, "32"), True, ""),
                                                        "moe-unstacked": ((*MOCK, *MOE), False, "module."),
                                                        "nemotron": (NEMOTRON, True, "")}
# name -> (model, ranks, flags); of a vocabulary of 90, 96 rows are stored.
LAYOUTS = {
    "one": ("dense", 1, (*PADDING, "1", "--layout", "colocated")),
    "tp2-dp2": ("dense", 4, (*PADDING, "128", "--encoder-tp", "2", "--llm-dp", "2")),
    "colocated": ("dense", 2, (*PADDING, "256", "--layout", "colocated", "--encoder-dp", "2", "--llm-tp", "2",
                               "--micro-batch-size", "2", "--sequence-parallel")),
    "pp2": ("dense", 3, (*PADDING, "32", "--llm-pp", "2")),
    "ep2": ("moe-unstacked", 3, (*MOE, "--llm-dp", "2", "--llm-ep", "2")),
    "nemotron-pp2": ("nemotron", 3, ("--llm-pp", "2")),
    "nemotron-ep2-tp2": ("nemotron", 4, tuple("--layout colocated --encoder-dp 2 --encoder-tp 2 --llm-tp 2 --llm-dp 2 "
                                              "--llm-ep 2 --sequence-parallel".split())),
}


class Sources:
    """Checkpoints of the models, made when they are first asked for."""

    def __init__(self, pool: WorkerPool, root: Path) -> None:
        self.pool, self.root = pool, root

    def folder(self, model: str) -> str:
        folder = self.root / model
        if not folder.exists():
            flags, stacked, outer = MODELS[model]
            self.pool.run(write, flags, str(folder), stacked, outer, world_size=1)
        return str(folder)


@pytest.fixture(scope="module")
def sources(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Sources:
    return Sources(pool, tmp_path_factory.mktemp("single"))


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_tensor_reaches_every_layout(pool: WorkerPool, sources: Sources, name: str) -> None:
    """To the bit, with the optimizer's copies, so that a step without a learning rate changes nothing."""
    model, ranks, flags = LAYOUTS[name]
    root = sources.folder(model)
    flags = (*(NEMOTRON if model == "nemotron" else MOCK), *flags)
    found = pool.run(load_and_step, flags, ranks, root, world_size=ranks)
    names = set().union(*(names for names, _ in found))
    assert names == set(torch.load(Path(root) / "expected.pt", weights_only=True))
    assert {name.split(".")[0] for name in names} == {"vision_model", "vision_projection", "language_model"}
    assert all(lines[0] == f"weights from {root}/iter_0000007" for _, lines in found)
    rows = [line for line in found[0][1] if "word_embeddings" in line]
    assert len(rows) == (model == "dense" and name != "pp2"), found[0][1]
    assert not (Path(root) / "ran").exists(), "common.pt was unpickled"


@pytest.mark.slow
def test_layers_that_differ_and_the_expert_bias(pool: WorkerPool, tmp_path: Path) -> None:
    """Dense and MoE layers under names of their own, the router's bias in float32; read by experts on two ranks."""
    (tmp_path / "config.json").write_text(json.dumps({**deepseek.SIZES, "model_type": "deepseek_v3"}))
    flags, root = (*TEXT, "--hf-config", str(tmp_path)), str(tmp_path / "saved")
    pool.run(write, flags, root, world_size=1)
    stored = tensors_of(Path(root) / "iter_0000007")
    biases = [key for key in stored if key.endswith("expert_bias")]
    assert biases == ["language_model.decoder.layers.1.mlp.router.expert_bias"]
    assert stored[biases[0]].properties.dtype is torch.float32
    found = pool.run(load_and_step, (*flags, "--llm-dp", "2", "--llm-ep", "2"), 2, root, world_size=2)
    assert set().union(*(names for names, _ in found)) >= set(biases)


PASSED_OVER = ", layers of multi-token prediction, which --hybrid-layer-pattern does not have"


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "layout"), [(1, ""), (4, "--llm-tp 2 --sequence-parallel --llm-dp 2 --llm-ep 2")])
def test_a_text_model_is_the_language_model_of_a_checkpoint(pool, sources, ranks, layout):
    """The checkpoint also has an encoder and multi-token prediction, which the run says it does not read."""
    root = sources.folder("nemotron")
    found = pool.run(load_and_step, (*NEMOTRON_TEXT, *layout.split()), ranks, root, world_size=ranks)
    expected = torch.load(Path(root) / "expected.pt", weights_only=True)
    language = {name for name in expected if name.startswith("language_model.") and ".mtp." not in name}
    assert set().union(*(names for names, _ in found)) == language
    first, *notes = found[0][1]
    assert first == f"weights from {root}/iter_0000007"
    assert any(note.endswith(PASSED_OVER) for note in notes), notes
    assert any(note.endswith(", encoder and projector, which a text model does not have") for note in notes), notes


@pytest.mark.slow
def test_a_pattern_without_multi_token_prediction_says_what_it_passes_over(pool: WorkerPool, sources: Sources) -> None:
    root, flags = sources.folder("nemotron"), (*NEMOTRON, "--hybrid-layer-pattern", "ME*-", "--layout", "colocated")
    ((names, (first, *notes)),) = pool.run(load_and_step, flags, 1, root, world_size=1)
    assert first == f"weights from {root}/iter_0000007" and not any(".mtp." in name for name in names)
    assert any(note.endswith(PASSED_OVER) for note in notes) and not any("text model" in note for note in notes), notes


@pytest.mark.slow
def test_names_and_shapes_are_those_of_the_megatron_model(pool: WorkerPool) -> None:
    """Compare RADIO, projector and hybrid decoder. The projector's norm is part of a layer that exists on GPUs only."""
    ((theirs, ours),) = pool.run(names_of_both, world_size=1)
    assert len(ours) > 50 and ours.pop("vision_projection.encoder.linear_fc1.layer_norm_weight") == (4 * 64,)
    assert ours == theirs


def test_tensors_that_do_not_fit_are_named_on_every_rank(pool: WorkerPool, sources: Sources, tmp_path: Path) -> None:
    """Load on two ranks that each hold a part of the language model or of the encoder."""
    root = sources.folder("dense")
    folder = Path(root) / "iter_0000007"
    norm = "vision_model.decoder.layers.self_attention.linear_qkv.layer_norm_weight"
    linear, words = "vision_projection.encoder.linear_fc2.weight", "language_model.embedding.word_embeddings.weight"
    assert {norm, linear, words} <= tensors_of(folder).keys()
    first_layer = norm.replace("layers", "layers.0")
    changes: list[tuple[Change, list[str]]] = [
        (partial(delete, norm),
         ["missing in the checkpoint (2):", f"\n  {first_layer} [32], and 1 like it in other layers"]),
        (partial(add_tensor, "language_model.more.weight"),
         ["in the checkpoint, but not in this run (1):", "\n  language_model.more.weight [1]"]),
        (partial(add_tensor, "audio_model.x"), ["but not in this run (1):", "audio_model.x [1]"]),
        (partial(rename, linear, f"{linear}_2"), [f"\n  {linear} [32, 32]", f"\n  {linear}_2 [32, 32]"]),
        (partial(reshape, linear), [f"\n  {linear}: shape [33, 32] in the checkpoint, [32, 32] in this run"]),
        (partial(recast, linear), [f"\n  {linear}: torch.float16 in the checkpoint, torch.bfloat16 in this run"]),
        (partial(drop_piece, words), [f"\n  {words}: its pieces leave something out or overlap"]),
        (partial(resize, words, 80),
         [f"\n  {words}: shape [80, 32] in the checkpoint, [96, 32] in this run, of which 90 rows"]),
        (partial(plant, INDEX, str(tmp_path / "ran")), [".metadata", "which is not data"]),
    ]
    flags = (*MOCK, *PADDING, "32", "--layout", "colocated", "--encoder-tp", "2", "--llm-dp", "2")
    tries = [(root, change) for change, _ in changes]
    rank_0, rank_1 = pool.run(refusals, flags, 2, tries, world_size=2)
    assert [message for message, _ in rank_1] == [""] * len(changes)
    for (change, parts), (message, kept) in zip(changes, rank_0, strict=True):
        assert message is not None and all(part in message for part in parts), f"{change}: {message}"
        assert message.startswith(f"{FLAG} {folder}"), message
        assert kept, f"{change}: the model was changed"
    assert all(kept for _, kept in rank_1)
    assert not (tmp_path / "ran").exists(), "code was run"


@pytest.mark.slow
def test_a_damaged_file_stops_every_rank(pool: WorkerPool, sources: Sources, tmp_path: Path) -> None:
    root = sources.folder("dense")
    folder = Path(root) / "iter_0000007"
    item = next(item for item in items_of(folder) if item.fqn == "vision_projection.encoder.linear_fc1.weight")
    shard = read_index(folder).storage_data[item].relative_path
    tries = [(root, partial(remove, shard)), (root, partial(plant, item, str(tmp_path / "ran")))]
    flags = (*MOCK, *PADDING, "32", "--llm-dp", "2")
    by_rank = pool.run(refusals, flags, 3, tries, world_size=3)
    for expected, messages in zip((f"{shard} cannot be read", item.fqn), zip(*by_rank, strict=True), strict=True):
        told = [message for message, _ in messages if message]
        assert len(told) == 1 and expected in told[0] and None not in [message for message, _ in messages], messages
    assert not (tmp_path / "ran").exists(), "code was run"


def test_a_model_of_another_size_is_one_error(pool: WorkerPool, sources: Sources) -> None:
    """Layers and experts are counted first; what is alike is one line."""
    root = sources.folder("moe-unstacked")
    flags = (*MOCK, *MOE, "--num-experts", "8", "--num-layers", "4", "--llm-dp", "2", "--llm-ep", "2")
    (message, kept), *others = (found[0] for found in pool.run(refusals, flags, 3, [(root, unchanged)], world_size=3))
    assert kept and [other for other, _ in others] == ["", ""] and message is not None
    first, layers, experts, *lines = message.splitlines()
    assert first == f"{FLAG} {root}/iter_0000007 does not fit the model; nothing was loaded"
    assert layers == "language_model.decoder.layers: 2 in the checkpoint, 4 in this run"
    assert experts == "language_model.decoder.layers.*.mlp.experts: 4 in the checkpoint, 8 in this run"
    assert len(lines) < 20
    router = "language_model.decoder.layers.0.mlp.router.weight"
    assert (f"  {router}: shape [4, 32] in the checkpoint, [8, 32] in this run, and 1 like it in other layers or "
            "experts") in lines


def test_another_variant_is_one_error(pool: WorkerPool, sources: Sources) -> None:
    """The layer pattern differs, which the ranks of two pipeline stages find."""
    root, flags = sources.folder("nemotron"), (*NEMOTRON, "--hybrid-layer-pattern", "ME*-ME", "--llm-pp", "2")
    (message, kept), *others = (found[0] for found in pool.run(refusals, flags, 3, [(root, unchanged)], world_size=3))
    assert kept and [other for other, _ in others] == ["", ""] and message is not None
    lines = message.splitlines()
    assert lines[1] == "language_model.decoder.layers: 4 in the checkpoint, 6 in this run"
    assert any(line.startswith("  language_model.decoder.layers.4.mixer.A_log [8]") for line in lines), message
    assert not any("language_model.mtp." in line for line in lines), message
    assert len(lines) < 50


@pytest.mark.slow
def test_folders_that_hold_no_such_checkpoint(pool: WorkerPool, sources: Sources, tmp_path: Path) -> None:
    own, empty, old, other, torn = (tmp_path / name for name in ("own", "empty", "old", "other", "torn"))
    pool.run(start_lines, (*MOCK, "--layout", "colocated", "--save", str(own)), 1, None, world_size=1)
    empty.mkdir()
    (old / "iter_0000003" / "mp_rank_00").mkdir(parents=True)
    for folder, content in ((other, b'{"sharded_backend": "zarr"}'), (torn, b'{"sharded')):
        folder.mkdir()
        (folder / "metadata.json").write_bytes(content)
    expected = {tmp_path / "absent": "there is no such folder", empty: "holds no checkpoint",
                old: "Megatron's old format, one file a rank (mp_rank_00); only torch_dist is loaded",
                other: "is of format zarr; only torch_dist is loaded", torn: "does not say which format",
                own: "is a checkpoint of this trainer, with modules of their own: give it as --load"}
    (found,) = pool.run(refusals, (*MOCK, "--layout", "colocated"), 1, [(str(root), unchanged) for root in expected],
                        world_size=1)
    for (root, part), (message, kept) in zip(expected.items(), found, strict=True):
        assert message is not None and message.startswith(f"{FLAG}") and str(root) in message, message
        assert part in message and kept, message


@pytest.mark.slow
def test_a_runs_own_checkpoint_wins(pool: WorkerPool, sources: Sources, tmp_path: Path) -> None:
    """The same command again, after a preemption; another path to the same weights is no difference to tell."""
    root = sources.folder("dense")
    flags = (*MOCK, *PADDING, "32", "--layout", "colocated", "--save", str(tmp_path), "--load", str(tmp_path))
    (first,) = pool.run(start_lines, flags, 1, root, world_size=1)
    (second,) = pool.run(start_lines, flags, 1, f"{root}/iter_0000007", world_size=1)
    assert first[0] == f"weights from {root}/iter_0000007"
    assert second == [f"loaded {tmp_path}/iter_0000000",
                      f"  {FLAG} {root}/iter_0000007 is not read: the checkpoint has the run's own weights"]


@pytest.mark.slow
def test_two_sources_of_the_same_weights_are_refused() -> None:
    with pytest.raises(ValueError, match=r"--load-single-checkpoint a gives .*; --load-vision-from would"):
        validate(single_model.parse_config(*MOCK, FLAG, "a", "--load-vision-from", "b"), 2)
