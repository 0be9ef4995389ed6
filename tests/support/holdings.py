"""Trainers whose holdings are read, and compared with what the export writes; inside worker processes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from tests.support import equality, weights


@dataclass
class Held:
    """Shards of a rank.

    Attributes:
        entries, holders: as `mimo.refit.trainer_shards` says.
        values: for each point in time, name, box and values of each of its boxes.
    """

    entries: list[Any]
    holders: dict[str, list[Any]]
    values: dict[str, list[tuple[str, Any, torch.Tensor]]]


@contextlib.contextmanager
def loaded_model(flags: tuple[str, ...], world_size: int, folder: str) -> Iterator[tuple[Any, Any, Any, Any]]:
    """Build a model like `weights.built_model`, with the weights of a folder."""
    from mimo.weights.load import HfPaths, load_hf

    with weights.built_model(flags, world_size) as (built, grids, provider, config):
        load_hf(built, grids, provider, config, HfPaths(model=folder))
        yield built, grids, provider, config


@torch.no_grad()
def reallocate(built: Any, factor: float) -> None:
    """Give every tensor other memory and other values."""
    for tensor in (*built.model.parameters(), *built.model.buffers()):
        if tensor.is_floating_point():
            tensor.data = tensor.data.clone().mul_(factor)


def held_and_exported(rank: int, flags: tuple[str, ...], world_size: int, folder: str, out: str) -> Held:
    """A rank's boxes; all export, too. Then the weights change and are re-allocated, and both is done again."""
    from mimo.refit.trainer_shards import ModelWeights
    from tests.support.export_live import export_model

    with loaded_model(flags, world_size, folder) as (built, grids, provider, config):
        found = ModelWeights(built, grids, provider, config, "float32").locate()
        live, values = found.live, {}
        for number, when in enumerate(("before", "after")):
            if number:
                reallocate(built, 3)
            values[when] = [(part.name, part.box, live.view(part.address, part.box.sizes).clone())
                            for part in found.slices]
            export_model(built, grids, provider, config, f"{out}/{when}")
        return Held(found.entries, found.holders, values)


def gathered(rank: int, flags: tuple[str, ...], world_size: int, folder: str, wire_dtype: str,
             biases: torch.Tensor) -> list[tuple[Any, torch.Tensor]]:
    """Whole tensors, doubled and re-allocated since an earlier iteration; routers' biases are set to `biases`."""
    from mimo.platform import current_platform
    from mimo.refit.trainer_shards import ModelWeights, WholeTensors

    with loaded_model(flags, world_size, folder) as (built, grids, provider, config):
        found = ModelWeights(built, grids, provider, config, wire_dtype).locate()
        tensors = WholeTensors(found, current_platform().device)
        assert [entry for entry, _ in tensors] == found.entries
        reallocate(built, 2)
        for name, buffer in built.model.named_buffers():
            if name.endswith("expert_bias"):
                buffer.copy_(biases)
        return [(entry, tensor.clone()) for entry, tensor in tensors]


def gathered_after_a_step(rank: int, flags: tuple[str, ...], world_size: int,
                          out: str) -> tuple[dict[str, torch.Tensor], bool]:
    """Whole tensors after a training step, which are exported, too; and whether the step had left some to be gathered
    from other replicas on this rank."""
    from mimo.config.validate import validate
    from mimo.refit.trainer_shards import ModelWeights, WholeTensors
    from mimo.registry import model_provider
    from mimo.training.step import train_step
    from tests.support.export_live import export_model

    config = equality.parse_config(*flags)
    layout, provider = validate(config, world_size), model_provider(config.model.model_provider)
    with equality.open_training(config, layout, rank) as (parts, loader):
        train_step(parts, loader.next_step())
        found = ModelWeights(parts.built, parts.grids, provider, config.model_family, "float32").locate()
        live = found.live
        before = [live.view(part.address, part.box.sizes).clone() for part in found.slices]
        tensors = {entry.name: tensor.clone()
                   for entry, tensor in WholeTensors(found, parts.platform.device)}
        was_open = any(not torch.equal(value, live.view(part.address, part.box.sizes))
                       for part, value in zip(found.slices, before, strict=True))
        export_model(parts.built, parts.grids, provider, config.model_family, out)
    return tensors, was_open


def refused_holdings(rank: int, flags: tuple[str, ...], folder: str) -> dict[str, list[str]]:
    """Return the errors of collecting shards of a model with another map or other tensors, by change."""
    from mimo.refit import trainer_shards as module
    from mimo.weights.rules import Direct, Rule

    found = {}
    with weights.built_model(weights.alone(flags), 1) as (built, grids, provider, config):
        whole, pieces_of = provider.weight_map(config, "language"), module.module_pieces
        norm = next(rule for rule in whole.rules if rule.megatron == "decoder.final_layernorm.weight")
        others = tuple(rule for rule in whole.rules if rule is not norm)

        def ask(rules: tuple[Any, ...], change: Callable[[list[Any]], list[Any]] = list) -> list[str]:
            class Changed:
                def weight_map(self, config: Any, name: str) -> Any:
                    return replace(whole, rules=rules) if name == "language" else provider.weight_map(config, name)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(module, "module_pieces", lambda part, groups: change(pieces_of(part, groups)))
                return weights.error_lines(
                    lambda: module.ModelWeights(built, grids, Changed(), config, "float32").locate())

        def cloned(pieces: list[Any]) -> list[Any]:
            return [replace(piece, tensor=piece.tensor.clone()) if piece.name == norm.megatron else piece
                    for piece in pieces]

        found["nothing"] = ask(whole.rules)
        found["unmapped"] = ask(others)
        found["missing"] = ask((*whole.rules, Rule("decoder.another", ("another",))))
        found["shape"] = ask((*others, replace(norm, convert=Direct((3,), (3,)))))
        found["copy"] = ask(whole.rules, cloned)
        found["lost"] = ask(whole.rules, lambda pieces: [piece for piece in pieces if piece.name != norm.megatron])
    return found


def refused_reads(rank: int, flags: tuple[str, ...]) -> dict[str, str]:
    """Return the errors of reading a weight that is not as it was at set-up, by change."""
    from mimo.refit.tensor_slices import Address
    from mimo.refit.trainer_shards import LiveTensors

    found = {}
    path = "decoder.final_layernorm.weight"
    with weights.built_model(weights.alone(flags), 1) as (built, grids, provider, config):
        live = LiveTensors(built)
        norm = built.model.language_model.module.decoder.final_layernorm
        kept = norm.weight.data

        def ask(what: str, name: str = f"language/{path}") -> None:
            try:
                live.view(Address(name, 0, (1,)), (4,))
            except RuntimeError as error:
                found[what] = str(error)

        ask("nothing")
        ask("unknown", f"language/{path}s")
        ask("module", f"vision/{path}")
        norm.weight.data = torch.cat([kept, kept])
        ask("grown")
        norm.weight.data = torch.cat([kept, kept])[::2]
        ask("strided")
        norm.weight.data = kept.clone()
        norm.weight.untyped_storage().resize_(0)
        ask("offloaded")
        norm.weight = None
        ask("removed")
    return found
