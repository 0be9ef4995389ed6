"""Gradients of latent attention over packed rows with Transformer Engine's kernels, against float32 in plain PyTorch.

Queries and keys have more channels than values. Megatron Core widens the values, with which the gradients of
queries and keys were wrong on H100 (`test_context_parallel.py`). The trainer calls the kernels as this test does.
"""

from __future__ import annotations

import importlib.util
import itertools

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU"),
    pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is None, reason="needs Transformer Engine"),
]
HEADS = 4


def expected(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: list[int]) -> torch.Tensor:
    found = []
    for first, stop in itertools.pairwise(starts):
        part = slice(first, stop)
        scores = torch.einsum("qhc,khc->hqk", query[part], key[part]) * query.shape[-1] ** -0.5
        later = torch.ones_like(scores[0], dtype=torch.bool).triu(1)
        found.append(torch.einsum("hqk,khc->qhc", scores.masked_fill(later, -1e9).softmax(-1), value[part]))
    return torch.cat(found)


@pytest.mark.parametrize("lengths", [(37, 40, 38, 29), (512, 300, 1000, 236)])
@pytest.mark.parametrize("channels", [(192, 128), (96, 64), (128, 128)])
def test_gradients_of_packed_rows(channels: tuple[int, int], lengths: tuple[int, ...]) -> None:
    import transformer_engine.pytorch as te

    torch.manual_seed(0)
    wide, narrow = channels
    starts = [0, *itertools.accumulate(lengths)]
    inputs = [torch.randn(starts[-1], HEADS, size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
              for size in (wide, wide, narrow)]
    gradient = torch.randn(starts[-1], HEADS, narrow, device="cuda", dtype=torch.bfloat16)
    exact = [each.detach().float().requires_grad_() for each in inputs]
    whole = expected(*exact, starts)
    whole.backward(gradient.float())
    attention = te.DotProductAttention(HEADS, channels, attention_dropout=0.0, attn_mask_type="padding_causal",
                                       qkv_format="thd", softmax_scale=wide**-0.5)
    cumulative = torch.tensor(starts, dtype=torch.int32, device="cuda")
    output = attention(*inputs, cu_seqlens_q=cumulative, cu_seqlens_kv=cumulative, max_seqlen_q=max(lengths),
                       max_seqlen_kv=max(lengths)).view(starts[-1], HEADS, narrow)
    output.backward(gradient)
    for name, ours, theirs in (("output", output, whole), *(
            (f"gradient of the {name}", each.grad, other.grad)
            for name, each, other in zip(("query", "key", "value"), inputs, exact, strict=True))):
        assert ours is not None and theirs is not None
        error = ((ours.float() - theirs).norm() / theirs.norm()).item()
        print(channels, lengths, name, error)
        assert error < 0.01, name
