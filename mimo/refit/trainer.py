"""A running trainer as the source of a refit: its model, its ranks, its address."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mimo.checkpoint.agree import from_first_rank
from mimo.grid.groups import Grids
from mimo.model.build import BuiltModel
from mimo.platform import current_platform
from mimo.protocols import ModelProvider
from mimo.refit.holdings import holdings
from mimo.refit.live import LiveTensors, finish_gathers
from mimo.refit.options import RefitOptions
from mimo.refit.sender import EngineClient, Trainer, WeightSender
from mimo.weights.rules import WeightMap


class ModelWeights:
    """A model's weights as `WeightSender` asks for them. Construct it on all ranks together.

    Args:
        built: this rank's model.
        grids: process groups.
        provider: the model family.
        family_config: its configuration.
        dtype: of weights on the wire.

    Raises:
        ValueError: on the first rank: the weight map and the model do not fit each other.
        ReportedElsewhereError: on the other ranks then.
    """

    def __init__(self, built: BuiltModel, grids: Grids, provider: ModelProvider, family_config: Any,
                 dtype: str) -> None:
        held = holdings(built, grids, provider, family_config, dtype)
        self.entries, self.holders, self.slots = held.entries, held.holders, held.slots
        maps = {module: provider.weight_map(family_config, module) for module in grids.layout.grids}
        self.spellings = module_spellings(maps, [entry.name for entry in held.entries])
        self._built = built
        self._live = LiveTensors(built)
        self._paths = tuple(dict.fromkeys(slot.address.tensor for slot in self.slots))

    def prepare(self) -> dict[str, torch.Tensor]:
        """Finish what an overlapped step left open; the tensors as they are now, by path. Collective."""
        finish_gathers(self._built)
        return {path: self._live.tensor(path) for path in self._paths}


def module_spellings(maps: Mapping[str, WeightMap], names: Sequence[str]) -> list[dict[str, Any]]:
    """Every way in which checkpoints spell each module's tensors; an engine's loader knows one of them.

    Args:
        maps: each module's map, in the order of the entries.
        names: of the entries: each module's in its first style.

    Returns:
        For each module `module`, `first` and `count` of its entries, and `styles`: style -> its entries' names.
    """
    found, first = [], 0
    for module, weight_map in maps.items():
        own = {weight_map.styles[0].spell(name): name for rule in weight_map.rules for name in rule.hf}
        count = 0
        while first + count < len(names) and names[first + count] in own:
            count += 1
        entries = [own[name] for name in names[first:first + count]]
        found.append({"module": module, "first": first, "count": count,
                      "styles": {style.name: [style.spell(name) for name in entries] for style in weight_map.styles}})
        first += count
    assert first == len(names), f"{len(names) - first} entries belong to no module, the first {names[first]}"
    return found


def _device(backend: str) -> torch.device:
    """Where messages lie."""
    on_gpu = backend == "nccl" or (backend == "ipc" and current_platform().name == "cuda")
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def connect(built: BuiltModel, grids: Grids, provider: ModelProvider, family_config: Any,
            client: EngineClient | None, num_workers: int, options: RefitOptions, address: str = "") -> WeightSender:
    """Connect a trainer with an engine. Collective over the trainer's world.

    Args:
        built: this rank's model.
        grids: process groups.
        provider: the model family.
        family_config: its configuration.
        client: the engine; only the first rank calls it, and others may have none.
        num_workers: of the engine.
        options: how weights travel.
        address: name or address under which workers reach the first rank; empty: this machine's name.

    Raises:
        ValueError, RefitError: trainer and engine do not fit each other, or somebody did not answer.
    """
    weights = ModelWeights(built, grids, provider, family_config, options.dtype)
    device = _device(options.backend)
    trainer = Trainer(grids.rank, grids.layout.world_size, lambda value: from_first_rank(grids, value),
                      from_first_rank(grids, address or socket.gethostname()), device)
    return WeightSender(weights, trainer, client, num_workers, options)
