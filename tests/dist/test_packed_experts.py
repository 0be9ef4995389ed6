"""Packed experts in data-parallel training: where weights and gradients lie, autograd, and overlapped reduction.

The product itself is a kernel for GPUs (tests/gpu/test_moe_kernels.py). Plain PyTorch stands in for it here, on the
same addresses and offsets.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.spawn import WorkerPool

pytestmark = pytest.mark.slow

EXPERTS, IN, OUT = 4, 16, 24
# Tokens of each expert, in each microbatch of a rank.
SIZES = [[[3, 0, 5, 2], [0, 0, 0, 10]], [[0, 0, 0, 0], [1, 2, 3, 4]]]


def plain_products(module: Any) -> None:
    """Put plain PyTorch in place of Transformer Engine's descriptors, products and ways of saving tensors."""
    sys.modules["transformer_engine.pytorch.quantized_tensor"] = SimpleNamespace(  # type: ignore[assignment]
        prepare_for_saving=lambda *tensors: (tensors, None), restore_from_func_ctx=lambda ctx: ctx.saved_tensors)

    def row_offsets(sizes: Any, *widths: int) -> Any:
        ends = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
        return sizes, *(ends * width for width in widths)

    def grouped_tensor(shape: Any, count: int, flat: Any, offsets: Any, *, shapes: Any = None,
                       first_dims: Any = None) -> Any:
        shapes = shapes or [(rows, shape[1]) for rows in first_dims.tolist()]
        begins = offsets.tolist()
        return [flat[begin:begin + rows * width].view(rows, width)
                for begin, (rows, width) in zip(begins[:count], shapes, strict=True)]

    def multiply(left: Any, right: Any, out: Any, layout: str, *, accumulate: bool = False,
                 split: bool = False) -> None:
        for one, two, result in zip(left, right, out, strict=True):
            product = (two.T if layout == "NT" else two) @ (one.T if layout == "TN" else one)
            result.copy_(result + product if accumulate else product)

    module._row_offsets, module._grouped_tensor, module._multiply = row_offsets, grouped_tensor, multiply


def gradients(rank: int, packed: bool, distributed_optimizer: bool, frozen: bool) -> Any:
    """Outputs, and gradients of inputs and weights after two microbatches whose reduction overlaps."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    from mimo.grid.groups import Grids
    from mimo.grid.spec import GridSpec, Layout
    from mimo.model import packed_experts

    plain_products(packed_experts)
    generator = torch.Generator().manual_seed(5)

    class Linear(torch.nn.Module):
        num_gemms = EXPERTS

        def __init__(self) -> None:
            super().__init__()
            for index in range(EXPERTS):
                weight = torch.nn.Parameter(torch.randn(OUT, IN, generator=generator), requires_grad=not frozen)
                self.register_parameter(f"weight{index}", weight)

        def forward(self, rows: Any, sizes: Any) -> Any:
            parts = rows.split(sizes.tolist())
            return torch.cat([part @ getattr(self, f"weight{index}").T for index, part in enumerate(parts)]), None

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(IN))
            self.linear = Linear()

        def forward(self, rows: Any, sizes: Any) -> Any:
            return self.linear(rows * self.scale, sizes)[0]

    with Grids(Layout("disjoint", 2, (), GridSpec("language", dp=2)), "gloo") as grids:
        model = Model()
        config = TransformerConfig(num_layers=1, hidden_size=IN, num_attention_heads=1)
        ddp = DistributedDataParallel(config, DistributedDataParallelConfig(
            use_distributed_optimizer=distributed_optimizer, overlap_grad_reduce=True, grad_reduce_in_fp32=True,
            bucket_size=OUT * IN), model, pg_collection=grids.collections["language"])
        if packed:
            layer = packed_experts.PackedLinear(model.linear, ddp)
            assert layer.can_run and layer.trains is not frozen
            model.linear.forward = layer
        results = []
        for _ in range(2):  # the first step records which gradients are to be expected
            ddp.zero_grad_buffer()
            results = []
            for index, sizes in enumerate(SIZES[rank]):
                rows = torch.randn(sum(sizes), IN, generator=torch.Generator().manual_seed(10 * rank + index))
                rows.requires_grad_()
                last = index == len(SIZES[rank]) - 1
                for group in ddp.bucket_groups:
                    group.is_last_microbatch = last
                out = ddp(rows, torch.tensor(sizes))
                (out ** 2).sum().backward()
                results += [out.detach().numpy(), rows.grad.numpy()]
            ddp.finish_grad_sync()
        # With the distributed optimizer a rank has the sums of its own shards alone; those of both make up all.
        buffer = ddp.buffers[0].grad_data.clone()
        return results, buffer.numpy(), [None if parameter.grad is None else 1 for parameter in model.parameters()]


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("distributed_optimizer", [True, False], ids=["distributed-optimizer", "plain-optimizer"])
def test_gradients_are_those_of_separate_products(pool: WorkerPool, distributed_optimizer: bool, frozen: bool) -> None:
    separate = pool.run(gradients, False, distributed_optimizer, frozen, world_size=2)
    packed = pool.run(gradients, True, distributed_optimizer, frozen, world_size=2)
    for one, two in zip(separate, packed, strict=True):
        for expected, found in zip(one[0], two[0], strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
        assert np.abs(one[1]).max() > 1
        np.testing.assert_allclose(two[1], one[1], rtol=1e-5, atol=1e-4)
        assert two[2] == one[2]


def offsets_of(rank: int) -> Any:
    from mimo.model.packed_experts import _offsets

    storage = torch.zeros(256)
    found = _offsets([storage[start:start + 32] for start in (96, 64, 0)])
    return found[0], found[1].tolist(), _offsets([storage[start:start + 32] for start in (96, 62)]) is None


def test_tensors_in_any_order_and_addresses_that_cannot_be_read(pool: WorkerPool) -> None:
    assert pool.run(offsets_of, world_size=1) == [(0, [96, 64, 0, 96], True)]


def recomputed_activation(rank: int) -> Any:
    """Output and gradients of two packed products with an activation between them, kept and computed again."""

    from mimo.model import compat, packed_experts, recompute

    plain_products(packed_experts)
    compat.replace_share_storage(recompute._fill_storage)
    compat.checkpoint_without_fp8()

    class Linear(torch.nn.Module):
        num_gemms = EXPERTS

        def __init__(self, rows: int, columns: int) -> None:
            super().__init__()
            for index in range(EXPERTS):
                weight = torch.nn.Parameter(torch.randn(rows, columns, generator=generator))
                self.register_parameter(f"weight{index}", weight)
            whole = torch.zeros(EXPERTS, rows, columns)
            for index, weight in enumerate(self.parameters()):
                weight.main_grad = whole[index]  # type: ignore[attr-defined]

    results, calls = [], [0]
    for again in (False, True):
        generator = torch.Generator().manual_seed(5)
        linears = [Linear(OUT, IN), Linear(IN, OUT)]
        wrapper: Any = SimpleNamespace(ddp_config=SimpleNamespace(overlap_grad_reduce=False))
        packed = [packed_experts.PackedLinear(linear, wrapper) for linear in linears]
        rows = torch.randn(10, IN, generator=generator).requires_grad_()
        probs = torch.rand(10, generator=generator).requires_grad_()

        def activation(hidden: Any, weights: Any, sizes: Any) -> Any:
            calls[0] += 1
            assert sizes.tolist() == [3, 0, 5, 2]
            return torch.sigmoid(hidden) * weights.unsqueeze(-1)

        experts: Any = SimpleNamespace(linear_fc1=packed[0], linear_fc2=packed[1], activation_recompute=again)
        out, _ = packed_experts._forward_experts(experts, activation, rows, torch.tensor([3, 0, 5, 2]), probs)
        (out ** 2).sum().backward()
        results.append([out.detach(), rows.grad, probs.grad,
                        *(parameter.main_grad for linear in linears for parameter in linear.parameters())])
    return [torch.equal(one, two) for one, two in zip(*results, strict=True)], calls[0]


def test_an_activation_that_is_computed_again_changes_no_bit(pool: WorkerPool) -> None:
    ((same, calls),) = pool.run(recomputed_activation, world_size=1)
    assert all(same) and len(same) == 3 + 2 * EXPERTS and calls == 3


def sort_without_the_host(tokens: Any, routing_map: Any, probs: Any, num_rows: int, fused: bool) -> Any:
    """Sort tokens as Transformer Engine's kernel does, which leaves rows after the last expert's as they are."""
    chosen = routing_map.T.flatten()
    position = torch.where(chosen, chosen.cumsum(0) - 1, num_rows)
    source = torch.full((num_rows + 1,), len(chosen)).scatter(0, position, torch.arange(len(chosen)))[:-1]
    nothing = tokens.new_full((1, tokens.shape[1]), float("nan"))
    rows = torch.cat([tokens.repeat(routing_map.shape[1], 1), nothing]).index_select(0, source)
    weights = torch.cat([probs.T.flatten(), nothing[0, :1]]).index_select(0, source)
    return rows, weights, position.view(-1, len(tokens)), None, None


def unsort_without_the_host(rows: Any, mapping: Any, shape: Any, fused: bool, pad_offsets: Any) -> Any:
    found = torch.cat([rows, torch.zeros_like(rows[:1])]).index_select(0, mapping.flatten())
    return found.view(*mapping.shape, -1).sum(dim=0).view(shape)


def gathered(rank: int, kind: str, dtype: torch.dtype) -> Any:
    """Output of a dispatcher that gathers, and the gradients of its tokens and weights, for experts that differ.

    `kind` is `slower`, `faster`, or `static`, which asserts that the host does not wait.
    """
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher

    from mimo.grid.groups import Grids
    from mimo.grid.spec import GridSpec, Layout
    from mimo.model import expert_rows
    from tests.support.graph_emulation import Graph

    config = TransformerConfig(num_layers=1, hidden_size=IN, num_attention_heads=1, num_moe_experts=EXPERTS,
                               moe_router_topk=2, moe_token_dispatcher_type="allgather")
    results = []
    with ExitStack() as stack:
        grids = stack.enter_context(Grids(Layout("disjoint", 2, (), GridSpec("language", dp=2, ep=2)), "gloo"))
        dispatcher = MoEAllGatherTokenDispatcher(2, [2 * rank, 2 * rank + 1], config, grids.collections["language"])
        if kind != "slower":
            expert_rows.gather_in_less_time(dispatcher, 1, static_rows=kind == "static")
        if kind == "static":
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            patch.setattr(expert_rows, "permute", sort_without_the_host)
            patch.setattr(expert_rows, "unpermute", unsort_without_the_host)
        for chosen in ([0, 1], [0, 2], [3, 1]):  # the second rank's experts get no tokens at first
            generator = torch.Generator().manual_seed(10 * rank + chosen[1])
            tokens = torch.randn(3, 1, IN, generator=generator).to(dtype).requires_grad_()
            routing_map = torch.zeros(3, EXPERTS, dtype=torch.bool)
            routing_map[:, chosen] = True
            routing_map[0] = routing_map[0].roll(rank) if chosen[0] else routing_map[0]
            probs = (torch.rand(3, EXPERTS, generator=generator) * routing_map).requires_grad_()
            with Graph() if kind == "static" else nullcontext():
                rows, weights = dispatcher.token_dispatch(*dispatcher.dispatch_preprocess(tokens, routing_map, probs))
                rows, sizes, weights = dispatcher.dispatch_postprocess(rows, weights)
            # Six tokens, each of which may go to both experts of the rank.
            assert kind != "static" or len(rows) == len(weights) == 12
            # Each expert multiplies by another number.
            factors = torch.arange(2.0).repeat_interleave(sizes).add(2 * rank + 1)
            factors = torch.cat([factors, torch.full((len(rows) - len(factors),), float("nan"))])
            rows = (torch.tanh(rows) * (factors * weights).unsqueeze(-1)).to(dtype)
            out = dispatcher.combine_postprocess(dispatcher.token_combine(dispatcher.combine_preprocess(rows)))
            (out ** 2).sum().backward()
            results += [sizes.tolist(), out.detach().tolist(), tokens.grad.tolist(), probs.grad.tolist()]
    return results


@pytest.mark.parametrize("kind", ["faster", "static"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_gathering_dispatcher_that_takes_less_time_changes_nothing(pool: WorkerPool, dtype: torch.dtype, kind: str
                                                                     ) -> None:
    expected, found = (pool.run(gathered, each, dtype, world_size=2) for each in ("slower", kind))
    assert found == expected
    assert [results[0] for results in found] == [[6, 6], [0, 0]]


def test_static_rows_are_refused_where_only_some_layers_have_packed_products(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.transformer.moe.experts import TEGroupedMLP

    from mimo.model import packed_experts

    class Experts(TEGroupedMLP):  # type: ignore[misc]
        def __init__(self) -> None:
            torch.nn.Module.__init__(self)

    monkeypatch.setenv("NVTE_USE_CUTLASS_GROUPED_GEMM", "0")  # restores it afterwards
    monkeypatch.setattr(packed_experts, "unsupported_reason", lambda dtype, recipe: None)
    monkeypatch.setattr(packed_experts, "pack_experts", lambda module, fp8, static_rows: 1)
    layers = torch.nn.ModuleList([Experts(), Experts()])
    options: Any = {"dtype": torch.bfloat16, "deterministic": False, "fp8": None}
    packed_experts.choose_grouped_gemm("auto", layers, static_rows=False, **options)
    packed_experts.choose_grouped_gemm("auto", layers[:1], static_rows=True, **options)
    with pytest.raises(ValueError, match="--moe-static-rows needs --moe-gemm packed, which cannot run here: biases"):
        packed_experts.choose_grouped_gemm("auto", layers, static_rows=True, **options)
