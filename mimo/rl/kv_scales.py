"""Scales of the engine's FP8 cache of keys and values, from the largest ones that the trainer computes itself.

They are static scales for a whole layer, as those of compressed-tensors: a key or value divided by its scale is stored
as e4m3, and multiplied by it when it is read. On GPUs, vLLM multiplies such keys by queries in e4m3, which have a scale
for the same reason.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.attention import Attention

from mimo.comm import gather
from mimo.grid.groups import Grids
from mimo.model.build import BuiltModel, named_modules_of
from mimo.protocols import LANGUAGE

KvScales = dict[int, tuple[float, float, float]]
"""Number of a layer, from 0 and counted over all pipeline stages -> scales of its keys, values and queries."""


class KvRanges:
    """Records the largest keys, values and queries that go into the attention of each layer of the language model.

    An engine caches these keys and values: they come after norms and rotary positions. Nothing waits for the device
    before `scales`. Construction and `scales` are collective over the world.

    Args:
        built: this rank's model.
        grids: process groups.
        device: device of the model.
    """

    def __init__(self, built: BuiltModel, grids: Grids, device: torch.device) -> None:
        attentions: list[Any] = [module for name, part in named_modules_of(built.model) if name == LANGUAGE
                                 for module in part.modules() if isinstance(module, Attention)]
        # Megatron Core counts layers from 1, over all stages.
        num_layers = max(gather(grids, max((each.layer_number for each in attentions), default=0)))
        self._largest = torch.zeros(num_layers, 3, device=device)
        self._is_recording = False
        self._padding: torch.Tensor | None = None
        for each in attentions:
            each.core_attention.register_forward_pre_hook(partial(self._record, each.layer_number - 1))

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Context that records the ranges of its forward passes, and forgets earlier ones."""
        self._largest.zero_()
        self._is_recording = True
        try:
            yield
        finally:
            self._is_recording, self._padding = False, None

    def next_row(self, padding: torch.Tensor) -> None:
        """Leave out the padding of the next row, which an engine does not cache.

        Padding at the end of a row is a sequence of its own, and keys of the first tokens of a sequence may be larger
        than all others.

        Args:
            padding: bool `[t]`, True for this rank's tokens that are padding.
        """
        if self._is_recording:
            self._padding = padding.to(self._largest.device)

    @torch.no_grad()
    def _record(self, layer: int, module: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
        if not self._is_recording:
            return
        padding = self._padding
        query, key, value = arguments[:3]  # [t, heads or groups, channels]
        for place, tensor in enumerate((key, value, query)):
            assert padding is not None and len(tensor) == len(padding), (tensor.shape, padding)
            found = torch.linalg.vector_norm(tensor, math.inf, dim=tuple(range(1, tensor.ndim)), dtype=torch.float32)
            largest = self._largest[layer, place]
            torch.maximum(largest, found.masked_fill_(padding, 0.0).amax(), out=largest)

    def scales(self) -> KvScales:
        """Return the scales of all layers for the ranges that the last `recording` of all ranks has found.

        Layers without attention have none, and neither have layers whose keys, values or queries are all zero or not
        finite.
        """
        # Ranks without the language model have zeros.
        dist.all_reduce(self._largest, op=dist.ReduceOp.MAX)
        found = (self._largest / torch.finfo(torch.float8_e4m3fn).max).tolist()
        return {layer: (key, value, query) for layer, (key, value, query) in enumerate(found)
                if all(math.isfinite(each) and each > 0 for each in (key, value, query))}
