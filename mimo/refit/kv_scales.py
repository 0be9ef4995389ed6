"""Scales of a worker's attention layers with an FP8 cache of keys and values, which come with the trainer's weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mimo.refit import compat
from mimo.refit.rendezvous import RefitError

# Backends of attention that read scales anew in every step, also inside of CUDA graphs. FlashInfer, for example, takes
# them as numbers, which stay in a graph that was captured.
BACKENDS = ("FLASH_ATTN", "CPU_ATTN")
FP8 = ("fp8", "fp8_e4m3")


def set_scales(model: Any, scales: Mapping[int, Sequence[float]] | None) -> list[int]:
    """Set the scales of all attention layers of a worker's model, in place. Layers that have none get 1.

    Loading weights sets all scales to 1, so this comes after it.

    Args:
        model: the worker's model.
        scales: number of a layer, from 0 and counted over all pipeline stages -> scales of its keys, values and
            queries. None leaves all layers as they are.

    Returns:
        The numbers of the layers that have got scales.

    Raises:
        RefitError: a layer has no cache of FP8 keys and values, its backend does not read scales in every step, or it
            is given another number of scales than three.
    """
    if scales is None:
        return []
    from vllm.model_executor.layers.attention import Attention, MLAAttention
    from vllm.model_executor.models.utils import extract_layer_index
    from vllm.v1.attention.backend import AttentionType

    found = []
    for layer in model.modules():
        if isinstance(layer, MLAAttention):
            raise RefitError(f"{layer.layer_name}: latent attention caches latents, which have no scales of keys and "
                             "values; use --engine-kv-scales one")
        if not isinstance(layer, Attention) or layer.attn_type != AttentionType.DECODER:
            continue
        backend = layer.attn_backend.get_name()
        if layer.kv_cache_dtype not in FP8:
            raise RefitError(f"{layer.layer_name}: its cache is {layer.kv_cache_dtype}, and only one of fp8 has scales "
                             "(--engine-kv-cache-dtype fp8)")
        if backend not in BACKENDS:
            raise RefitError(f"{layer.layer_name}: vLLM's attention backend {backend} does not read the scales of its "
                             f"cache in every step; known to do so are {' and '.join(BACKENDS)}. Use "
                             "--engine-kv-scales one")
        number = extract_layer_index(layer.layer_name)
        of_layer = scales.get(number, (1.0, 1.0, 1.0))
        if len(of_layer) != len(compat.CACHE_SCALES):
            raise RefitError(f"{layer.layer_name}: got the scales {list(of_layer)}, and needs three: of keys, values "
                             "and queries")
        if number in scales:
            found.append(number)
        compat.set_cache_scales(layer, of_layer)
    return found
