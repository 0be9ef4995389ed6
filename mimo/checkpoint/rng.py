"""States of the random generators, one for each rank of each module, as data that loads without running code."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject

from mimo.grid.groups import Grids
from mimo.platform.base import Platform


def rng_objects(platform: Platform | None, grids: Grids) -> dict[str, ShardedObject]:
    """This rank's generator state under each of its modules; without `platform` only the places, for loading.

    The key of a module carries its sizes: on a grid with others there is no state to go on from.
    """
    state = None if platform is None else _plain(platform.rng_state())
    objects = {}
    for name in grids.modules:
        spec = grids.layout.grids[name]
        place = spec.coordinates(grids.rank)
        shape = (spec.pp, spec.dp * spec.cp, spec.tp)
        offset = (place["pp"], place["dp"] * spec.cp + place["cp"], place["tp"])
        objects[name] = ShardedObject(f"mimo.{name}.rng_state", state, shape, offset, replica_id=0)
    return objects


def restore_rng(platform: Platform, state: dict[str, Any]) -> None:
    """Set every generator to a state that `rng_objects` saved."""
    version, words, gauss = state["python"]
    kind, keys, *rest = state["numpy"]
    platform.set_rng_state({
        **state,
        "python": (version, tuple(words.tolist()), gauss),
        "numpy": (kind, keys.numpy().astype(np.uint32), *rest),
    })


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    version, words, gauss = state["python"]
    kind, keys, *rest = state["numpy"]
    tracker = {name: value.clone() if isinstance(value, torch.Tensor) else value
               for name, value in state["tracker"].items()}
    return {
        "python": [version, torch.tensor(words), gauss],
        "numpy": [kind, torch.from_numpy(keys.astype(np.int64)), *rest],
        "torch": state["torch"].clone(),
        "device": state["device"].clone(),
        "tracker": tracker,
    }
