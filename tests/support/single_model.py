"""Megatron checkpoints of a whole model, written by Megatron Core, and trainers that start from them."""

from __future__ import annotations

import argparse
import contextlib
import copy
import hashlib
import pickle
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from mimo.protocols import LANGUAGE, MegatronSource
from providers import deepseek_v3, mock
from tests.support import deepseek, equality
from tests.support.damage import COMMON, Bomb, Change, changed, edited_index
from tests.support.global_state import sharded_tensors
from tests.support.steps import trainer_of

MOCK = (*equality.MODEL, "--model-provider", "tests.support.single_model:mock_provider", "--bf16",
        "--global-batch-size", "4")
NEMOTRON = ("--model-provider", "nemotron-moe-vlm-tiny", "--hybrid-layer-pattern", "ME*-/*E", "--mock-image-size", "32",
            "--moe-router-bias-update-rate", "0", "--bf16", "--global-batch-size", "4")
# The language model of `NEMOTRON`, without its layers of multi-token prediction.
NEMOTRON_TEXT = (*"""--model-provider nemotron_h --hybrid-layer-pattern ME*- --hidden-size 64 --num-attention-heads 8
--num-query-groups 2 --kv-channels 16 --ffn-hidden-size 128 --vocab-size 512 --mamba-num-heads 8 --mamba-head-dim 16
--mamba-num-groups 2 --mamba-state-dim 16 --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 32
--moe-shared-expert-intermediate-size 64""".split(), *NEMOTRON[6:])
TEXT = ("--model-provider", "tests.support.single_model:text_provider", "--bf16")
FLAG = "--load-single-checkpoint"


@dataclass(frozen=True)
class Config(mock.Config):
    """Model family: mock, from a checkpoint of the whole model."""

    load_single_checkpoint: str = ""
    """Megatron checkpoint of the whole model."""


class MockProvider(mock.MockProvider):
    Config = Config

    def megatron_source(self, config: Config) -> MegatronSource | None:
        if not config.load_single_checkpoint:
            return None
        return MegatronSource(config.load_single_checkpoint, FLAG, {
            "vision": {"": "vision_model.", "encoders.vit.": "vision_model.",
                       "input_projections.0.": "vision_projection.encoder."},
            LANGUAGE: {"": "language_model."},
        }, ((r"^vision_model\.summary\.", "a head that only pretraining uses"),))


@dataclass(frozen=True)
class TextConfig(deepseek_v3.Config):
    """Model family: a text model with layers that differ, from a checkpoint of the whole model."""

    load_single_checkpoint: str = ""
    """Megatron checkpoint of the whole model."""


class TextProvider(deepseek_v3.DeepseekV3Provider):
    Config = TextConfig

    def megatron_source(self, config: TextConfig) -> MegatronSource | None:
        if not config.load_single_checkpoint:
            return None
        return MegatronSource(config.load_single_checkpoint, FLAG, {LANGUAGE: {"": "language_model."}})


mock_provider, text_provider = MockProvider(), TextProvider()


def flag_of(flags: tuple[str, ...]) -> str:
    """Return the flag of the model's provider that names the checkpoint."""
    is_nemotron = flags[flags.index("--model-provider") + 1].startswith("nemotron")
    return "--load-nemotron-checkpoint" if is_nemotron else FLAG


def parse_config(*flags: str) -> Any:
    """Flags over the small mock model, or over the small DeepSeek's run."""
    is_text = TEXT[1] in flags or NEMOTRON_TEXT[1] in flags
    return deepseek.parse_config(*flags) if is_text else equality.parse_config(*flags)


trainer = partial(trainer_of, parse=parse_config)


def held(parts: Any) -> Iterator[tuple[str, Any]]:
    """(name in the checkpoint, piece) of every global tensor of this rank, layers and experts apart."""
    from tests.support.weights import held_pieces

    for module, pieces in held_pieces(parts.built, parts.grids).items():
        for piece in pieces:
            name = piece.name if module != LANGUAGE else f"language_model.{piece.name}"
            name = re.sub(r"^encoders\.(vit|radio)\.", "vision_model.", name)
            yield name.replace("input_projections.0.", "vision_projection.encoder."), piece


def write(rank: int, flags: tuple[str, ...], root: str, stacked: bool = True, outer: str = "") -> None:
    """Save the model of one process as Megatron-LM does, at iteration 7, and its tensors in `root`/expected.pt.

    Args:
        rank: 0.
        flags: flags of the model.
        root: folder of the checkpoints, which is made.
        stacked: whether equal layers are stacked, as some versions do.
        outer: put in front of every key.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

    folder = Path(root) / "iter_0000007"
    folder.mkdir(parents=True)
    with trainer(rank, (*flags, *(() if TEXT[1] in flags else ("--layout", "colocated"))), 1) as (parts, _):
        expected: dict[str, torch.Tensor] = {}
        for name, piece in held(parts):  # their tensors are detached
            key = f"{name}{piece.box.slices}".encode()
            seed = int.from_bytes(hashlib.blake2b(key, digest_size=4).digest(), "little")
            noise = torch.randn(piece.tensor.shape, generator=torch.Generator().manual_seed(seed))
            piece.tensor.copy_(noise * 0.05 + (1 if "norm" in name and name.endswith("weight") else 0))
            expected.setdefault(name, torch.full(piece.shape, float("nan"), dtype=piece.tensor.dtype))
            expected[name][piece.box.slices] = piece.tensor
        torch.save(expected, Path(root) / "expected.pt")
        model = _model_entries(parts, stacked, outer)
        moment = ShardedTensor.from_rank_offsets("optimizer.state.exp_avg.language_model.x.weight", torch.zeros(3))
        objects = {"rng": ShardedObject("rng_state", [{"seed": 1}], (1,), (0,)),
                   "extra": ShardedObject("language_model.decoder.layers.0._extra_state", b"", (1,), (0,))}
        # Megatron's arguments are a class of their own, which nobody should unpickle.
        dist_checkpointing.save({"model": model, "optimizer": moment, **objects, "iteration": 7,
                                 "args": argparse.Namespace(lr=1.0)}, str(folder))
    (Path(root) / "latest_checkpointed_iteration.txt").write_text("7")
    # Where older versions have the arguments.
    (folder / COMMON).write_bytes(pickle.dumps(Bomb(f"{root}/ran")))


def _model_entries(parts: Any, stacked: bool, outer: str) -> dict[str, Any]:
    """Return the sharded state dict of what Megatron-LM's multimodal model has as one tree."""
    from megatron.core.utils import unwrap_model

    from mimo.model.build import named_modules_of

    entries: list[Any] = []
    for module, part in named_modules_of(parts.built.model):
        inner, metadata = unwrap_model(part), {"dp_cp_group": parts.grids.collections[module].dp_cp}
        trees = {"language_model.": inner} if module == LANGUAGE else {
            "vision_model.": next(iter(inner.encoders.values())),
            "vision_projection.encoder.": inner.input_projections[0]}
        for prefix, tree in trees.items():
            entries += sharded_tensors(tree, outer + prefix, (), metadata)
    return {str(number): entry if stacked else _with_layer_in_name(entry) for number, entry in enumerate(entries)}


def _with_layer_in_name(entry: Any) -> Any:
    """Return a tensor of a stacked layer under a key of its own."""
    block, layers, rest = entry.key.partition("decoder.layers.")
    if not layers or rest[0].isdigit():
        return entry
    return replace(entry, key=f"{block}{layers}{entry.global_offset[0]}.{rest}", global_shape=entry.global_shape[1:],
                   global_offset=entry.global_offset[1:], prepend_axis_num=entry.prepend_axis_num - 1,
                   axis_fragmentations=None if entry.axis_fragmentations is None else entry.axis_fragmentations[1:])


@contextlib.contextmanager
def started(rank: int, flags: tuple[str, ...], world_size: int) -> Iterator[tuple[Any, Any, Any, list[str]]]:
    """A trainer that has started as its flags say, (parts, loader, state, lines); all tensors were NaN before."""
    from mimo.registry import model_provider
    from mimo.training.setup import run_state, start

    with trainer(rank, flags, world_size) as (parts, loader):
        for _, piece in held(parts):
            piece.tensor.fill_(float("nan"))
        parts.optimizer.reload_model_params()
        state = run_state(parts, loader)
        provider = model_provider(parts.config.model.model_provider)
        progress, lines = start(state, provider, loader, parts.watchdog)
        assert progress.iteration == progress.consumed_samples == 0
        yield parts, loader, state, lines


def load_and_step(rank: int, flags: tuple[str, ...], world_size: int, root: str) -> tuple[set[str], list[str]]:
    """Start from a checkpoint and compare every tensor, then take a step with no learning rate and compare again.

    Returns:
        The names of this rank's tensors, and what the start reported.
    """
    from mimo.training.step import train_step

    # In its first step a warm-up has no learning rate yet.
    flags = (*flags, flag_of(flags), root, "--train-iters", "9", "--lr-warmup-iters", "2")
    expected = torch.load(Path(root) / "expected.pt", weights_only=True)
    with started(rank, flags, world_size) as (parts, loader, state, lines):
        assert not (wrong := differences(parts, expected)), f"rank {rank} after the load: {wrong}"
        for one in state.held(state.saved()):
            assert one.has_main and one.main.dtype is torch.float32, one.saved.name
            assert torch.equal(one.main.view(-1), one.weights.float()), f"fp32 copy of {one.saved.name}"
        groups = [group for one in state.held(state.saved()) for group in one.inner.param_groups]
        assert {group["lr"] for group in groups} == {0}
        assert train_step(parts, loader.next_step()).success
        parts.built.model.disable_forward_pre_hook()
        # Routers balance their bias without a learning rate.
        wrong = [name for name in differences(parts, expected) if not name.endswith("expert_bias")]
        assert not wrong, f"rank {rank} after a step: {wrong}"
        return {name for name, _ in held(parts)}, lines


def differences(parts: Any, expected: dict[str, torch.Tensor]) -> list[str]:
    """Tensors of this rank that are not those of the checkpoint, bit for bit; padding that it lacks must be zero."""
    found = []
    for name, piece in held(parts):
        whole = expected[name]
        if piece.shape != tuple(whole.shape):
            assert "word_embeddings" in name or "output_layer" in name, (name, piece.shape, whole.shape)
            rows = torch.zeros(piece.shape, dtype=whole.dtype)
            rows[:len(whole)] = whole[:len(rows)]
            whole = rows
        if piece.tensor.dtype != whole.dtype or not torch.equal(piece.tensor, whole[piece.box.slices]):
            found.append(name)
    return found


def refusals(rank: int, flags: tuple[str, ...], world_size: int, tries: list[tuple[str, Change]]
             ) -> list[tuple[str | None, bool]]:
    """Return what the start says of each (path, change to its checkpoint), in one trainer.

    Returns:
        The error on this rank ("" where another rank has the word, None where the checkpoint loads) and whether every
        tensor is what it was.
    """
    import torch.distributed as dist

    from mimo.registry import model_provider
    from mimo.training.setup import run_state
    from mimo.watchdog.process_exit import ReportedElsewhereError
    from mimo.weights.import_megatron import load_single_model

    found: list[tuple[str | None, bool]] = []
    with trainer(rank, (*flags, flag_of(flags), tries[0][0]), world_size) as (parts, loader):
        state, provider = run_state(parts, loader), model_provider(parts.config.model.model_provider)
        family = parts.config.model_family
        source, vocab_size = provider.megatron_source(family), provider.token_spec(family).vocab_size
        before = [piece.tensor.clone() for _, piece in held(parts)]
        for root, change in tries:
            folder, message = Path(root) / "iter_0000007", None
            with changed(folder, change) if rank == 0 and folder.is_dir() else contextlib.nullcontext():
                dist.barrier()
                try:
                    load_single_model(state, replace(source, path=root), vocab_size, parts.watchdog)
                except ValueError as error:
                    message = str(error)
                except ReportedElsewhereError:
                    message = ""
                dist.barrier()
            kept = all(torch.equal(old, piece.tensor) for old, (_, piece) in zip(before, held(parts), strict=True))
            found.append((message, kept))
    return found


def unchanged(folder: Path) -> None:
    """No change."""


def resize(key: str, rows: int, folder: Path) -> None:
    """Give a tensor another number of rows."""
    with edited_index(folder) as metadata:
        stored = metadata.state_dict_metadata[key]
        stored.size = torch.Size([rows, *stored.size[1:]])
        (chunk,) = stored.chunks
        stored.chunks = [replace(chunk, sizes=stored.size)]


def start_lines(rank: int, flags: tuple[str, ...], world_size: int, root: str | None) -> list[str]:
    """Start from `root`, if given, save at once and return the report."""
    from mimo.checkpoint.save import Saver
    from mimo.checkpoint.state import Progress

    source = () if root is None else (flag_of(flags), root)
    with started(rank, (*flags, *source), world_size) as (parts, loader, state, lines):
        state.streams = loader.state_dict()
        Saver(state, parts.watchdog).save(Progress())
        return lines


def names_of_both(rank: int) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """Shapes by global name: of Megatron Core's multimodal model, and as the run of the same sizes asks for them."""
    from megatron.core.models.multimodal.llava_model import LLaVAModel
    from megatron.core.utils import unwrap_model

    from mimo.model.language import hybrid_stack_spec
    from mimo.model.layer_specs import mlp_linears, vit_layer_spec
    from mimo.weights.rules import global_name
    from tests.support.weights import built_model

    # Sizes that Megatron Core's model has no arguments for, and no prediction layers, which ask for its global groups.
    flags = (*NEMOTRON, "--hybrid-layer-pattern", "ME*-", "--vision-max-image-size", "2048", "--vision-patch-size",
             "16", "--layout", "colocated")
    with built_model(flags, 1) as (built, grids, _, config):
        language = copy.copy(unwrap_model(built.model.language_model).config)
        vision = unwrap_model(built.model.modality_submodules["vision"])
        radio, groups = copy.copy(vision.encoder.config), grids.collections[LANGUAGE]
        language.language_model_type, radio.vision_model_type = "nemotron6-moe", "radio"
        radio.class_token_len = config.vision_class_token_len
        model = LLaVAModel(
            language, hybrid_stack_spec(language), config.padded_vocab_size(1), 64, radio,
            vit_layer_spec(radio, "local"), True, vision.input_projections[0].config, mlp_linears("local"), img_h=512,
            img_w=512, patch_dim=16, hybrid_layer_pattern=config.hybrid_layer_pattern, pixel_shuffle=True,
            language_position_embedding_type="none", dynamic_resolution=True, pg_collection=groups)
        theirs = {global_name(entry.key, entry.global_offset[:entry.prepend_axis_num]):
                  tuple(entry.global_shape[entry.prepend_axis_num:])
                  for name, part in model.named_children()
                  for entry in sharded_tensors(part, f"{name}.", (), {"dp_cp_group": groups.dp_cp})}
        return theirs, {name: piece.shape for name, piece in held(SimpleNamespace(built=built, grids=grids))}
