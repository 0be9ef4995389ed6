"""Traces of the copies of small loaders, none of which is performed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from mimo.boxes import Box
from mimo.refit.dispatch_trace import VIEWS, Tracer, Write
from mimo.refit.tensor_slices import Address, TensorSlice

Loader = Callable[[torch.Tensor, torch.Tensor], object]


def traced(load: Loader, dtype: torch.dtype = torch.float32, parameter_dtype: torch.dtype = torch.float32,
           device: str = "meta") -> list[Write]:
    """Runs a loader from "w" of 4 x 6 into "p" of 8 x 6."""
    parameter = torch.nn.Parameter(torch.full((8, 6), 7.0, dtype=parameter_dtype), requires_grad=False)
    source = torch.empty(4, 6, dtype=dtype, device=device)
    tracer = Tracer([("p", parameter)])
    tracer.watch("w", source)
    with tracer:
        load(parameter, source)
    assert torch.equal(parameter, torch.full_like(parameter, 7.0)), "the live tensor has changed"
    return tracer.writes


ROWS = TensorSlice("w", Box((1, 0), (3, 6)), Address("p", 24, (6, 1)))


@pytest.mark.parametrize("load", [
    lambda p, w: p.data[4:6].copy_(w[1:3]),
    lambda p, w: p[4:6].copy_(w.clone()[1:3]),
    lambda p, w: p[4:6].copy_(w.narrow(0, 1, 2).t().contiguous().t()),
    lambda p, w: p[4:6].copy_(w.to(torch.float64)[1:].clone()[:2].contiguous()),
    lambda p, w: p[4:6].copy_(w.to("cpu").detach()[1:3].view(3, 4).view(-1).view(2, 6)),
    lambda p, w: p.data.__setitem__(slice(4, 6), w[1:3]),
    lambda p, w: p.data.view(2, 4, 6)[1, :2].copy_(w.unsqueeze(0)[:, 1:3].squeeze(0)),
    lambda p, w: p.data[4:6].flatten().copy_(w[1:3].reshape(-1)),
])
def test_a_copy_of_a_box_is_noted_as_it(load: Loader) -> None:
    (write,) = traced(load)
    assert write.names == {"w"} and write.copied == ROWS


def test_a_transposed_copy_is_the_same_box_with_other_strides() -> None:
    (write,) = traced(lambda p, w: p.data.view(-1)[:24].view(6, 4).copy_(w.t()))
    assert write.copied == TensorSlice("w", Box((0, 0), (4, 6)), Address("p", 0, (1, 4)))


@pytest.mark.parametrize("load", [
    lambda p, w: p[:4].copy_(w * 1),
    lambda p, w: p[:4].copy_(-torch.exp(w.float())),
    lambda p, w: p[:4].add_(w),
    lambda p, w: p.copy_(torch.cat([w, w])),
    lambda p, w: p.copy_(w[0]),  # repeated
    lambda p, w: p[:2].copy_(w[::2]),
    lambda p, w: p[:4].copy_(w.to(torch.bfloat16).to(torch.float32)),
    lambda p, w: p[:4].copy_(torch.empty_like(w).copy_(w)),
    lambda p, w: p[:4].copy_(w.view(torch.int32)),
    lambda p, w: p[:4].copy_(w.neg_()),
    lambda p, w: torch.mul(w, 2, out=p.data[:4]),
])
def test_anything_else_is_computed(load: Loader) -> None:
    writes = traced(load)
    assert [write.copied for write in writes] == [None] * len(writes) and writes[-1].names == {"w"}


def test_values_computed_from_a_loaded_parameter_have_its_names() -> None:
    plain, computed = traced(lambda p, w: (p.data[:4].copy_(w), p.data.copy_(-torch.exp(p.float()))))
    assert plain.copied is not None and computed.copied is None and computed.names == {"w"}


@pytest.mark.parametrize(("middle", "exact"), [(torch.float32, True), (torch.float64, True), (torch.float16, False),
                                               (torch.bfloat16, True)])
def test_casts_in_between_that_lose_nothing_are_copies(middle: torch.dtype, exact: bool) -> None:
    (write,) = traced(lambda p, w: p[:4].copy_(w.to(middle)), torch.float32, torch.bfloat16)
    assert (write.copied is not None) == exact


def test_constants_are_told_with_their_value() -> None:
    writes = traced(lambda p, w: (p.data[4:].zero_(), p.data[:1].fill_(2.0), p[0:0].fill_(1.0),
                                  p.data[1:2].copy_(torch.ones(1, 6))))
    assert [write.value for write in writes] == [0.0, 2.0, None] and not any(write.names for write in writes)
    assert writes[0].region is not None and writes[0].region.offset == 24


def test_a_loader_may_use_its_own_work_space() -> None:
    def load(parameter: torch.Tensor, source: torch.Tensor) -> None:
        table = torch.zeros(4, dtype=torch.long)
        table[2] = 1
        parameter[:1].copy_(source[int(table[2])].unsqueeze(0))
    (write,) = traced(load)
    assert write.copied == TensorSlice("w", Box((1, 0), (2, 6)), Address("p", 0, (0, 1)))


def test_a_work_space_that_was_there_before_the_trace_is_followed_through_its_views() -> None:
    space = torch.zeros(4, 6)
    (write,) = traced(lambda p, w: (space[:].copy_(w), p[:4].copy_(space)), device="cpu")
    assert write.names == {"w"} and write.copied is None


def test_operations_that_need_no_notes_return_views() -> None:
    assert [operation for operation in VIEWS if not operation.is_view] == []


def test_values_can_be_read_from_a_real_source_only() -> None:
    def load(parameter: torch.Tensor, source: torch.Tensor) -> None:
        parameter[:4].copy_(source * source[0, 0].item())
    with pytest.raises(RuntimeError, match="meta"):
        traced(load)
    (write,) = traced(load, device="cpu")
    assert write.names == {"w"} and write.copied is None


def test_the_names_of_a_failed_operation_are_known() -> None:
    parameter, sources = torch.empty(4), {name: torch.empty(4, device="meta") for name in "ab"}
    tracer = Tracer([("p", parameter)])
    for name, tensor in sources.items():
        tracer.watch(name, tensor)
    with pytest.raises(RuntimeError), tracer:
        parameter.copy_(sources["a"])
        sources["b"].clone().view(3)
    assert tracer.failed == {"b"} and [write.names for write in tracer.writes] == [{"a"}]
    tracer.forget(["a"])
    assert not tracer.writes


def test_views_of_one_storage_are_told_apart() -> None:
    storage = torch.zeros(10)
    tracer = Tracer([("first", storage[:4]), ("second", storage[4:])])
    source = torch.empty(2, device="meta")
    tracer.watch("w", source)
    with tracer:
        storage[5:7].copy_(source)
    assert tracer.writes[0].copied == TensorSlice("w", Box((0,), (2,)), Address("second", 1, (1,)))
