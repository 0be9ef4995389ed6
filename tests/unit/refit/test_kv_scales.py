"""Scales of an FP8 cache in a worker: which layers get them, and which are refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mimo.refit import compat, kv_scales
from mimo.refit.rendezvous import RefitError

pytestmark = pytest.mark.slow  # vLLM takes half a minute to import

ONES = [(1.0,) * 3, (1.0,) * 3, (1.0,) * 2]


def attention(kind, number, backend="CPU_ATTN", dtype="fp8", attn_type="decoder"):
    """An attention layer as vLLM makes it, without a cache."""
    from vllm.model_executor.layers.attention.attention import set_default_quant_scales

    layer = kind.__new__(kind)
    torch.nn.Module.__init__(layer)
    layer.layer_name, layer.kv_cache_dtype, layer.attn_type = f"model.layers.{number}.self_attn.attn", dtype, attn_type
    layer.attn_backend = SimpleNamespace(get_name=lambda: backend)
    set_default_quant_scales(layer, register_buffer=True)
    return layer


def read(layer):
    return [tuple(float(getattr(layer, name)) for name in names) for names in compat.CACHE_SCALES]


def test_layers_get_their_scales_in_place_and_others_get_one():
    from vllm.model_executor.layers.attention import Attention

    first, second, encoder = attention(Attention, 0), attention(Attention, 3), attention(
        Attention, 3, "FLASHINFER", attn_type="encoder_only")
    tensors = [getattr(second, names[0]) for names in compat.CACHE_SCALES]
    model = torch.nn.ModuleList([first, second, encoder])
    assert kv_scales.set_scales(model, {3: (0.5, 2.0, 1.5), 8: (7.0, 7.0, 7.0)}) == [3]
    assert read(first) == read(encoder) == ONES and read(second) == [(0.5,) * 3, (2.0,) * 3, (1.5,) * 2]
    assert all(getattr(second, names[0]) is tensor for names, tensor in zip(compat.CACHE_SCALES, tensors, strict=True))
    assert kv_scales.set_scales(model, {0: (3.0, 4.0, 5.0)}) == [0]
    assert read(first) == [(3.0,) * 3, (4.0,) * 3, (5.0,) * 2] and read(second) == ONES
    with pytest.raises(RefitError, match=r"layers\.0\.self_attn\.attn: got the scales \[0\.5, 0\.5\], and needs three"):
        kv_scales.set_scales(model, {0: (0.5, 0.5)})


@pytest.mark.parametrize(("kind", "options", "expected"), [
    ("Attention", {"backend": "FLASHINFER"}, "vLLM's attention backend FLASHINFER does not read the scales"),
    ("Attention", {"dtype": "auto"}, "its cache is auto, and only one of fp8 has scales"),
    ("MLAAttention", {}, "latent attention caches latents")])
def test_layers_that_would_not_read_scales_are_refused(kind, options, expected):
    from vllm.model_executor.layers import attention as layers

    layer = attention(getattr(layers, kind), 1, **options)
    with pytest.raises(RefitError, match=rf"model\.layers\.1\.self_attn\.attn: {expected}"):
        kv_scales.set_scales(torch.nn.ModuleList([layer]), {1: (0.5, 0.5, 0.5)})
