"""Packed rows: samples behind one another give the losses and gradients that each gives in a row of its own."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support import packing
from tests.support.packing import Outcome
from tests.support.spawn import WorkerPool

TOLERANCE = 3e-6
VISION = """--vision-image-size 16 --vision-patch-size 8 --vision-num-layers 2 --vision-hidden-size 32
--vision-num-attention-heads 4 --vision-ffn-hidden-size 48 --image-token-id 95"""
MODELS = {
    "llava": f"--model-provider mock --num-query-groups 2 {VISION}",
    "llama": "--model-provider causal_lm --num-query-groups 1 --use-rope-scaling --rotary-base 5e5",
    "qwen3": "--model-provider causal_lm --num-query-groups 2 --qk-layernorm --kv-channels 16 "
             "--no-untie-embeddings-and-output-weights",
    "mixtral": "--model-provider causal_lm --num-query-groups 2 --num-experts 4 --moe-ffn-hidden-size 24",
    "deepseek": """--model-provider deepseek_v3 --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 16
        --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 12
        --first-k-dense-replace 1 --moe-shared-expert-intermediate-size 16 --moe-router-num-groups 1
        --moe-router-group-topk 1 --moe-router-bias-update-rate 0 --original-max-position-embeddings 16
        --rotary-scaling-factor 4""",
}
# name -> (ranks without and with an encoder, flags)
LAYOUTS = {"one-process": (1, 1, "--layout colocated"), "tp2": (2, 3, "--llm-tp 2 --sequence-parallel"),
           "pp2": (2, 3, "--llm-pp 2"), "dp2": (2, 3, "--llm-dp 2"),
           "recomputed": (2, 3, "--llm-tp 2 --sequence-parallel --recompute full"), "cp2": (2, 3, "--llm-cp 2"),
           "cp2-tp2": (4, 4, "--layout homogeneous --llm-cp 2 --llm-tp 2 --sequence-parallel --recompute full"),
           "cp2-pp2": (4, 4, "--layout homogeneous --llm-cp 2 --llm-pp 2"),
           "cp4": (4, 4, "--layout homogeneous --llm-cp 4 --seq-length 64"),
           "recomputed-attention": (2, 3, "--llm-tp 2 --sequence-parallel --recompute selective")}




@pytest.fixture(scope="module")
def oracle_of(pool: WorkerPool) -> Callable[[str], Outcome]:
    """The samples of a model one by one, computed once."""

    @functools.cache
    def oracle(model: str) -> Outcome:
        layout = ("--layout", "colocated") if model == "llava" else ()
        (outcome,) = pool.run(packing.run, (*MODELS[model].split(), *layout), 1, False, world_size=1)
        return outcome

    return oracle


@pytest.mark.slow
@pytest.mark.parametrize(("model", "layout"), list(itertools.product(MODELS, LAYOUTS)))
def test_a_pack_equals_its_samples_one_by_one(pool: WorkerPool, oracle_of: Any, model: str, layout: str) -> None:
    text_ranks, ranks, flags = LAYOUTS[layout]
    if model != "llava":
        ranks, flags = text_ranks, flags.replace("--layout colocated", "").replace("--layout homogeneous", "")
    outcomes = pool.run(packing.run, (*MODELS[model].split(), *flags.split()), ranks, True, world_size=ranks)
    rows = next(outcome.rows for outcome in outcomes if outcome.rows)
    assert max(len(row) for row in rows) == 4, "three samples and padding"
    found = packing.differences(oracle_of(model), outcomes, TOLERANCE)
    assert not found, "\n".join(found)


def queries_of(rank: int, flags: tuple[str, ...], together: bool) -> list[Any]:
    """Return the queries of the first layer's attention: `[t, heads, channels]` of each sample in turn."""
    from mimo.model.attention import PackedDotProductAttention

    found: list[torch.Tensor] = []
    forward = PackedDotProductAttention.forward

    def record(self: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.layer_number == 1:
            found.append(query.detach().flatten(0, -3))
        return forward(self, query, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PackedDotProductAttention, "forward", record)
        outcome = packing.run(rank, flags, 1, together)
    if not together:
        return found
    # A row that a sample does not fill ends with padding.
    last = [-1 if sum(row) > sum(length for length, _ in pack) else None
            for row, pack in zip(outcome.rows, packing.PACKS, strict=True)]
    return [part for row, lengths, stop in zip(found, outcome.rows, last, strict=True)
            for part in row.split(list(lengths))[:stop]]


def test_positions_start_again_with_every_sample(pool: WorkerPool) -> None:
    # Rotary scores depend on distances alone: losses would not show positions that run on.

    flags = tuple(MODELS["llama"].split())
    (packed,) = pool.run(queries_of, flags, True, world_size=1)
    (alone,) = pool.run(queries_of, flags, False, world_size=1)
    assert [len(query) for query in packed] == [length for pack in packing.PACKS for length, _ in pack]
    for query, expected in zip(packed, alone, strict=True):
        torch.testing.assert_close(query, expected, rtol=1e-5, atol=1e-6)


def rows_together(rank: int, starts: list[int]) -> tuple[Any, Any, list[int]]:
    """`[t, 1, 6]` of sequences that run together and of each alone, and how many ran at a time.

    A running sum stands for attention: it knows where a sequence begins, too.
    """
    from mimo.model import attention
    from mimo.model.attention import DotProductAttention, PackedDotProductAttention

    sizes: list[int] = []

    def attend(self: Any, query: Any, key: Any, value: Any, *others: Any) -> Any:
        sizes.append(query.shape[1])
        return ((query * key).cumsum(0) + value).flatten(2)

    query, key, value = torch.randn(3, starts[-1], 2, 3, generator=torch.Generator().manual_seed(1))
    row = SimpleNamespace(cu_seqlens_q=torch.tensor(starts))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DotProductAttention, "forward", attend)
        patch.setattr(attention, "MAX_SCORES", 3 * 4 * 4)
        layer = PackedDotProductAttention.__new__(PackedDotProductAttention)
        together = PackedDotProductAttention.forward(layer, query, key, value, None, packed_seq_params=row)
    alone = [attend(None, *(each[start:stop, None] for each in (query, key, value)))
             for start, stop in itertools.pairwise(starts)]
    return together, torch.cat(alone), sizes[: -len(alone)]


@pytest.mark.slow
def test_sequences_of_one_length_are_rows_of_a_batch(pool: WorkerPool) -> None:
    starts = [0, 4, 5, 9, 13, 14, 14, 21, 25, 29]
    ((together, alone, sizes),) = pool.run(rows_together, starts, world_size=1)
    torch.testing.assert_close(together, alone, rtol=0, atol=0)
    assert sizes == [3, 2, 2, 1], "of 4 tokens as many as their scores allow, then the other two, of 1 and of 7"


def rotated(rank: int, starts: list[int], positions: int) -> tuple[Any, Any]:
    """Return a packed row, its gradient beside it, rotated in one go and by Megatron Core."""
    from mimo.model import compat
    from mimo.model.layer_ops import apply_packed_rotary

    found = []
    group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    generator = torch.Generator().manual_seed(1)
    row, freqs = torch.randn(starts[-1], 2, 8, generator=generator), torch.randn(positions, 1, 1, 6,
                                                                                generator=generator)
    for apply in (apply_packed_rotary, compat.rotary_of_packed_rows):
        own = row.clone().requires_grad_()
        done = apply(own, torch.tensor(starts, dtype=torch.int32), freqs, rotary_interleaved=False, mscale=1.5,
                     cp_group=group)
        done.square().sum().backward()
        found.append(torch.cat([done.detach(), own.grad]))
    return found[0], found[1]


@pytest.mark.parametrize(("starts", "positions"), [([0, 3, 4, 9], 6), ([0, 9], 9), ([0, 2, 2, 9], 9)])
def test_positions_of_a_row_at_once_are_those_of_each_sample(pool, starts, positions):
    ((at_once, one_by_one),) = pool.run(rotated, starts, positions, world_size=1)
    torch.testing.assert_close(at_once, one_by_one, rtol=0, atol=0)


def rotated_rows(rank: int, dtype: torch.dtype, channels: int, options: dict[str, Any]) -> tuple[list[Any], bool]:
    """Return rows and their gradient, rotated by us and by Megatron Core, and whether we save the angles alone."""
    from mimo.model import compat
    from mimo.model.layer_ops import apply_rotary

    generator = torch.Generator().manual_seed(1)
    rows, freqs = torch.randn(5, 2, 3, 8, generator=generator), torch.randn(5, 2, 1, channels, generator=generator)
    upstream = torch.randn(rows.shape, generator=generator).to(dtype)
    found, saved = [], []
    for apply in (compat.rotary_of_rows, apply_rotary):
        own = rows.to(dtype, copy=True).requires_grad_()
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda each: saved.append(each.data_ptr()) or each, lambda x: x):
            done = apply(own, freqs, **options)
        done.backward(upstream)
        found.append((done.detach(), own.grad))
    return found, set(saved) == {freqs.data_ptr()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"rotary_interleaved": True}, {"mla_rotary_interleaved": True, "mscale": 1.5}])
@pytest.mark.parametrize("channels", [8, 6])
def test_rotary_positions_have_megatrons_bits_and_save_angles_alone(pool, dtype, options, channels):
    (((theirs, ours), angles_alone),) = pool.run(rotated_rows, dtype, channels, options, world_size=1)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert angles_alone
