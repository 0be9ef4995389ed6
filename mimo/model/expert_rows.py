"""Rows of routed tokens: how dispatchers sort them by expert with as little waiting as possible.

The dispatchers of Megatron Core copy the number of tokens of each expert to the host, which waits for the device in
every layer. With products that take these numbers from the device (`mimo.model.packed_experts`) the host needs them
only to know how many rows other ranks send. Where FP8 products need multiples, zero rows are added to those of each
expert while they are sorted.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.moe.moe_utils import permute, unpermute
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher

from mimo.model import compat


def stay_on_device(dispatcher: Any, multiple: int) -> None:
    """Skip the token exchange of a grid without expert parallelism.

    Its ranks send no tokens, so nothing on the host needs the number of tokens of an expert, and tokens that were
    sorted by expert once need no second sorting.

    Args:
        dispatcher: the token dispatcher of a layer.
        multiple: number of which each expert's rows have to be a multiple; zero rows are added.
    """
    compat.leave_counts_on_device(dispatcher)
    if dispatcher.shared_experts is None:
        # Nothing overlaps with the exchange, whose three calls are only autograd functions that return their input.
        dispatcher.token_dispatch = lambda tokens, probs: (tokens, probs)
        dispatcher.token_combine = lambda hidden: hidden
    dispatcher.dispatch_postprocess = lambda tokens, probs: (tokens, dispatcher.tokens_per_expert, probs)
    dispatcher.combine_preprocess = lambda hidden: hidden
    if multiple > 1:
        dispatcher.dispatch_preprocess = partial(_sort_and_fill, dispatcher, multiple)
        dispatcher.combine_postprocess = partial(_unsort_filled, dispatcher)


def _sort_and_fill(dispatcher: Any, multiple: int, hidden: torch.Tensor, routing_map: torch.Tensor,
                   probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Replace the dispatcher's `dispatch_preprocess`: sort tokens by expert, and add zero rows to each expert's.

    There are as many rows as in the worst case, so that the host need not wait for the counts. Rows after the last
    expert's are never read.

    Args:
        dispatcher: the token dispatcher of the layer, on which `_unsort_filled` finds what it needs.
        multiple: number of which each expert's rows have to be a multiple.
        hidden: `[..., hidden]`.
        routing_map: bool `[tokens, experts]`.
        probs: `[tokens, experts]`.

    Returns:
        `[rows, hidden]` and `[rows]`, zero in the rows that were added.
    """
    if dispatcher.shared_experts is not None:
        dispatcher.shared_experts.pre_forward_comm(hidden)
    dispatcher.hidden_shape = hidden.shape
    tokens = hidden.reshape(-1, hidden.shape[-1])
    _count_rows(dispatcher, routing_map, multiple)
    most = len(tokens) * dispatcher.config.moe_router_topk + routing_map.shape[1] * (multiple - 1)
    return _sort_rows(dispatcher, tokens, routing_map, probs, most + -most % multiple)


def _count_rows(dispatcher: Any, routing_map: torch.Tensor, multiple: int) -> None:
    """Store on the dispatcher how many rows each expert gets, and how many rows are added before its first one."""
    counts = routing_map.sum(dim=0)
    missing = -counts % multiple
    dispatcher.tokens_per_expert = counts + missing
    dispatcher.pad_offsets = missing.cumsum(0) - missing if multiple > 1 else None


def _sort_rows(dispatcher: Any, tokens: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor,
               num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort tokens by expert into rows as `_count_rows` has counted them; return the rows and their weights."""
    if dispatcher.pad_offsets is None:
        rows, row_probs, mapping, _, _ = permute(tokens, routing_map, probs, num_rows,
                                                 fused=dispatcher.config.moe_permute_fusion)
    else:
        # Transformer Engine's own function for this waits for the counts.
        rows, mapping, row_probs = torch.ops.te_moe.permute_mask_map_fwd(tokens, routing_map, num_rows, probs,
                                                                         dispatcher.pad_offsets)
    dispatcher.reversed_local_input_permutation_mapping = mapping
    return rows, row_probs


def _unsort_filled(dispatcher: Any, rows: torch.Tensor) -> torch.Tensor:
    """Replace the dispatcher's `combine_postprocess`: sum each token's rows, and add the shared experts' output."""
    shape = dispatcher.hidden_shape
    output = _unsort_rows(dispatcher, rows, torch.Size((shape[:-1].numel(), shape[-1]))).view(shape)
    return output if dispatcher.shared_experts is None else output + dispatcher.shared_experts.get_output()


def _unsort_rows(dispatcher: Any, rows: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Sum the rows that `_sort_rows` has made of each token; `shape` is that of all tokens."""
    tokens: torch.Tensor = unpermute(rows, dispatcher.reversed_local_input_permutation_mapping, shape,
                                     fused=dispatcher.config.moe_permute_fusion, pad_offsets=dispatcher.pad_offsets)
    return tokens


def gather_in_less_time(dispatcher: MoEAllGatherTokenDispatcher, multiple: int, *, static_rows: bool = False) -> None:
    """Have the dispatcher that gathers all tokens wait for the device once in a layer, and send no float32.

    Its own methods wait for the counts of the experts and again for their weights, after all tokens have arrived. The
    host needs the number of rows alone, and can have it while the tokens are on their way. To sum what ranks have
    computed in bfloat16, its own methods turn it into float32 before they send it, and gradients on their way back.

    Args:
        dispatcher: the token dispatcher of a layer, which then leaves the counts of its experts on the device.
        multiple: number of which each expert's rows have to be a multiple; zero rows are added.
        static_rows: whether there are as many rows as in the worst case. The host then waits for nothing.
    """
    dispatcher.token_dispatch = partial(_gather, dispatcher, multiple, static_rows)
    dispatcher.dispatch_postprocess = partial(_sort_gathered, dispatcher, multiple)
    dispatcher.combine_preprocess = lambda rows: _unsort_rows(dispatcher, rows, dispatcher.hidden_shape_before_permute)
    dispatcher.token_combine = lambda hidden: _SumOverRanks.apply(hidden, dispatcher.tp_ep_group)


def _gather(dispatcher: Any, multiple: int, static_rows: bool, hidden: torch.Tensor,
            probs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Gather the tokens of all ranks, and their weights for this rank's experts."""
    first, group = dispatcher.local_expert_indices[0], dispatcher.tp_ep_group
    local = slice(first, first + dispatcher.num_local_experts)
    with torch.no_grad():
        routing_map = gather_from_sequence_parallel_region(dispatcher.routing_map, group=group)
        dispatcher.local_map, dispatcher.routing_map = routing_map[:, local].contiguous(), None
        _count_rows(dispatcher, dispatcher.local_map, multiple)
        dispatcher.counted = None
        if static_rows:
            most = min(dispatcher.config.moe_router_topk, dispatcher.num_local_experts)  # experts of a token
            num_rows = len(routing_map) * most + dispatcher.num_local_experts * (multiple - 1)
            dispatcher.num_rows = num_rows + -num_rows % multiple
        else:
            dispatcher.num_rows = dispatcher.tokens_per_expert.sum().to("cpu", non_blocking=True)
            dispatcher.counted = torch.cuda.current_stream().record_event() if hidden.is_cuda else None
    probs = gather_from_sequence_parallel_region(probs, group=group)[:, local].contiguous()
    # A graph needs memory of its own, which nothing else writes.
    return gather_from_sequence_parallel_region(hidden, group=group, use_global_buffer=not static_rows), probs


def _sort_gathered(dispatcher: Any, multiple: int, hidden: torch.Tensor,
                   probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sort the gathered tokens; return rows, the number of rows of each expert, and the rows' weights."""
    dispatcher.hidden_shape_before_permute = hidden.shape
    if dispatcher.counted is not None:
        dispatcher.counted.synchronize()
    # Transformer Engine refuses to make no rows at all. It never reads rows after the last expert's, as PyTorch would.
    num_rows = max(int(dispatcher.num_rows), multiple if dispatcher.config.moe_permute_fusion else 0)
    rows, dispatcher.local_probs = _sort_rows(dispatcher, hidden, dispatcher.local_map, probs, num_rows)
    return rows, dispatcher.tokens_per_expert, dispatcher.local_probs


class _SumOverRanks(torch.autograd.Function):
    """Sum the rows of all ranks in float32, where each rank gets the sums of its own tokens.

    Rows are sent in their own dtype, to the rank that sums them. A reduction in that dtype could round several times.
    """

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        parts = torch.empty_like(rows)
        dist.all_to_all_single(parts, rows.contiguous(), group=group)
        return parts.unflatten(0, (group.size(), -1)).sum(dim=0, dtype=torch.float32).to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        whole = gradient.new_empty(ctx.group.size() * len(gradient), gradient.shape[1])
        dist.all_gather_into_tensor(whole, gradient.contiguous(), group=ctx.group)
        return whole, None
