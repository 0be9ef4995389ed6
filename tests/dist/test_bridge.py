"""The bridge inside whole steps: nothing to move, evaluation in between, what travels, when gradients are reduced."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from tests.support.equality import Outcome, assert_equal, run_layout, run_oracle
from tests.support.spawn import WorkerPool

pytestmark = pytest.mark.slow

ONE_PROCESS = ("--layout", "colocated")
# name -> (ranks, flags)
LAYOUTS = {
    "encoder-dp1-llm-dp2": (3, "--llm-dp 2"),
    "encoder-tp2-llm-tp2": (4, "--encoder-tp 2 --llm-tp 2 --sequence-parallel"),
    "encoder-pp2": (3, "--encoder-pp 2"),
    "colocated-fan-in": (2, "--layout colocated --encoder-dp 2 --llm-tp 2 --micro-batch-size 2 --sequence-parallel"),
    "colocated-fan-out": (2, "--layout colocated --encoder-tp 2 --llm-dp 2"),
}
EVALUATED = {**{name: layout for name, layout in LAYOUTS.items() if name != "encoder-dp1-llm-dp2"},
             "two-samples-of-two-lanes": (3, "--llm-dp 2 --micro-batch-size 2"),
             "encoder-dp2-llm-dp1": (3, "--encoder-dp 2 --micro-batch-size 3"),
             "encoder-pp2-llm-pp2": (4, "--encoder-pp 2 --llm-pp 2"),
             "run-ahead": (3, "--llm-dp 2 --encoder-run-ahead 3"),
             "overlapped-parameter-gather": (3, "--llm-dp 2 --overlap-grad-reduce --overlap-param-gather"),
             "llm-cp2": (3, "--llm-cp 2")}
TEXT_ONLY = ("--mock-text-only-fraction", "1.0")


# Steps in which no lane has an image

@pytest.fixture(scope="module")
def text_only_oracle(pool: WorkerPool) -> Outcome:
    return pool.run(run_oracle, TEXT_ONLY, world_size=1)[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_lane_has_an_image(pool: WorkerPool, text_only_oracle: Outcome, layout: str) -> None:
    world_size, flags = LAYOUTS[layout]
    outcomes = pool.run(run_layout, (*flags.split(), *TEXT_ONLY), world_size, world_size=world_size)
    assert_equal(text_only_oracle, outcomes)
    vision = [piece for outcome in outcomes for piece in outcome.gradients if "modality_submodules" in piece.key]
    assert vision and not any(piece.value.any() for piece in vision)


# Evaluation between steps

# Answers of one to three tokens out of six words: some samples match by chance.
SHORT = ("--vocab-size", "8", "--image-token-id", "7", "--mock-min-length", "2", "--mock-max-length", "4")
NUM_EVALUATED = 31  # of three batches of 12: the last samples do not count


def evaluate_and_train(rank: int, flags: tuple[str, ...], world_size: int) -> list[tuple[float, ...]]:
    """Evaluation and training in turn: (loss, exact match, samples) and (loss, gradient norm)."""
    from mimo.training.evaluate import evaluate
    from mimo.training.step import train_step
    from tests.support.equality import make_loader
    from tests.support.steps import trainer_of

    figures: list[tuple[float, ...]] = []
    with trainer_of(rank, (*SHORT, *flags), world_size) as (parts, loader):
        held_out = make_loader(parts.config, parts.grids.layout, rank, split="valid")
        batches = [held_out.next_step() for _ in range(3)]
        held_out.close()
        for _ in range(3):
            found = evaluate(parts, batches, NUM_EVALUATED)
            result = train_step(parts, loader.next_step())
            figures += [(found.loss, found.exact_match, found.num_samples), (result.loss, result.grad_norm)]
    return figures


def evaluate_plainly(rank: int) -> tuple[float, float, int]:
    """The first evaluation by its definition: on one process, one sample at a time, from the logits, in fp64."""
    from tests.support.equality import make_loader
    from tests.support.steps import trainer_of

    loss, tokens, matched, samples = 0.0, 0, 0, 0
    with trainer_of(rank, (*SHORT, *ONE_PROCESS), 1) as (parts, _), torch.no_grad():
        model = parts.built.model
        held_out = make_loader(parts.config, parts.grids.layout, rank, split="valid")
        for batch in [batch for _ in range(3) for batch in held_out.next_step()]:
            if samples == NUM_EVALUATED:
                break
            rows = [[sum(batch.encoders["vision"].token_counts)]]
            model.colocated_comms["vision", "language"].begin_step(rows, rows)
            logits = model(batch, with_labels=False)[0].double()
            targets = batch.text.loss_mask[0].bool()
            labels = batch.text.labels[0]
            loss += torch.nn.functional.cross_entropy(logits[targets], labels[targets], reduction="sum").item()
            tokens += int(targets.sum())
            matched += bool((logits.argmax(-1) == labels)[targets].all())
            samples += 1
    return loss / tokens, matched / samples, samples


@pytest.fixture(scope="module")
def one_process(pool: WorkerPool) -> list[tuple[float, ...]]:
    figures = pool.run(evaluate_and_train, ONE_PROCESS, 1, world_size=1)[0]
    assert figures[0] == pytest.approx(pool.run(evaluate_plainly, world_size=1)[0], rel=1e-6)
    assert 0 < figures[0][1] < 1 and figures[0][2] == NUM_EVALUATED
    oracle = pool.run(run_oracle, SHORT, world_size=1)[0]
    trained = list(zip(oracle.losses, oracle.grad_norms, strict=True))
    assert figures[1::2] == [pytest.approx(step, rel=1e-5) for step in trained], "evaluation leaves training alone"
    return figures


@pytest.mark.parametrize("layout", EVALUATED)
def test_evaluation_between_steps(pool: WorkerPool, one_process: list[tuple[float, ...]], layout: str) -> None:
    world_size, flags = EVALUATED[layout]
    for figures in pool.run(evaluate_and_train, tuple(flags.split()), world_size, world_size=world_size):
        assert figures == [pytest.approx(expected, rel=1e-5) for expected in one_process]


def decode(rank: int, flags: tuple[str, ...], world_size: int) -> list[tuple[str, list[int], list[int]]]:
    """Decode the answers of a held-out global batch greedily."""
    from mimo.training.evaluate import greedy_decode
    from tests.support.equality import make_loader
    from tests.support.steps import trainer_of

    with trainer_of(rank, (*SHORT, *flags), world_size) as (parts, _):
        return greedy_decode(parts, make_loader(parts.config, parts.grids.layout, rank, split="valid").next_step())


def decode_a_conversation(rank: int) -> tuple[list[list[int]], list[tuple[str, list[int], list[int]]]]:
    """Decode two answers, between which is the user's text, with a model that always says the token after the last one.

    Returns the inputs of each pass and the result.
    """
    from mimo.data.batch import Microbatch
    from mimo.training import evaluate
    from tests.support.equality import make_loader
    from tests.support.steps import trainer_of

    seen = []

    def next_tokens(parts: Any, microbatches: list[Microbatch]) -> list[torch.Tensor]:
        seen.append(microbatches[0].text.input_ids[0].tolist())
        return [batch.text.input_ids + 1 for batch in microbatches]

    with trainer_of(rank, ONE_PROCESS, 1) as (parts, _), pytest.MonkeyPatch.context() as patch:
        batch = make_loader(parts.config, parts.grids.layout, rank).next_step()[0]
        ids = torch.tensor([[10, 20, 30, 40, 50, 60, 70, 80]])
        labels = torch.tensor([[20, 30, 40, 50, 60, 70, 80, 90]])
        mask = torch.tensor([[0, 1, 1, 0, 0, 0, 1, 1]])  # the last answer ends after the row
        text = replace(batch.text, keys=["one"], input_ids=ids, labels=labels, loss_mask=mask)
        patch.setattr(evaluate, "next_tokens", next_tokens)
        return seen, evaluate.greedy_decode(parts, [replace(batch, text=text)])


def test_each_answer_of_a_conversation_is_decoded_after_the_users_text(pool: WorkerPool) -> None:
    ((seen, decoded),) = pool.run(decode_a_conversation, world_size=1)
    assert decoded == [("one", [30, 40, 80, 90], [21, 22, 71, 72])]
    assert seen == [[10, 20, 0, 0, 50, 60, 70, 0], [10, 20, 21, 0, 50, 60, 70, 0],
                    [10, 20, 21, 22, 50, 60, 70, 0], [10, 20, 21, 22, 50, 60, 70, 71]]


@pytest.mark.parametrize("layout", ["llm-cp2", pytest.param("homogeneous-cp2-pp2", marks=pytest.mark.slow)])
def test_context_parallel_ranks_decode_the_same_tokens(pool: WorkerPool, layout: str) -> None:
    world_size, flags = {"llm-cp2": (3, "--llm-cp 2"),
                         "homogeneous-cp2-pp2": (4, "--layout homogeneous --llm-cp 2 --llm-pp 2")}[layout]
    (expected,) = pool.run(decode, ONE_PROCESS, 1, world_size=1)
    found = [each for each in pool.run(decode, tuple(flags.split()), world_size, world_size=world_size) if each]
    assert len(found) >= 2 and all(each == expected for each in found)


# What travels

def record_transfers(rank: int, flags: tuple[str, ...], world_size: int) -> dict[str, Any]:
    """Take one step and list the P2P batches and other work of each transfer of the bridge.

    Returns:
        transfers: (operation, [(kind, rows, columns, dtype) of each message] of each batch).
        others: blocking messages outside the host group, on the whole step.
        operations: names of the tensor operations inside transfers.
        rows: rows that this rank's replica exchanges with each peer, for each microbatch.
    """
    import torch.distributed as dist
    from torch.utils._python_dispatch import TorchDispatchMode

    from mimo.bridge.disjoint import Bridge
    from mimo.training.step import train_step
    from tests.support.steps import trainer_of

    transfers: list[tuple[str, list[Any]]] = []
    operations: set[str] = set()
    others: list[str] = []
    transfer, batch_p2p = Bridge._transfer, dist.batch_isend_irecv

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            operations.add(function.overloadpacket.__name__)
            return function(*args, **(kwargs or {}))

    def record_transfer(bridge: Bridge, what: str, *args: Any) -> Any:
        transfers.append((what, []))
        with Names():
            return transfer(bridge, what, *args)

    def record_batch(batch: list[Any]) -> Any:
        messages = [(message.op.__name__, *message.tensor.shape, str(message.tensor.dtype)) for message in batch]
        transfers[-1][1].append(messages)
        return batch_p2p(batch)

    def record_other(host: Any, name: str, call: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("group") is not host:
            others.append(name)
        return call(*args, **kwargs)

    with trainer_of(rank, flags, world_size) as (parts, loader), pytest.MonkeyPatch.context() as patch:
        microbatches = loader.next_step()
        for name in ("send", "recv"):
            patch.setattr(dist, name, partial(record_other, parts.grids.host, name, getattr(dist, name)))
        patch.setattr(Bridge, "_transfer", record_transfer)
        patch.setattr(dist, "batch_isend_irecv", record_batch)
        train_step(parts, microbatches)
        rows = parts.communicator.bridges[0]._rows
    return {"transfers": transfers, "operations": operations, "others": others, "rows": rows}


def test_a_transfer_is_one_batch_with_a_message_for_each_peer(pool: WorkerPool) -> None:
    flags = ("--llm-dp", "2", "--mock-text-only-fraction", "0.0")
    encoder, *lanes = pool.run(record_transfers, flags, 3, world_size=3)
    send, receive = ["isend"], ["irecv"]
    messages = {"send_forward": send, "recv_backward": receive, "send_forward_recv_backward": send + receive,
                "recv_forward": receive, "send_backward": send, "send_backward_recv_forward": send + receive}
    for found, peers in ((encoder, 2), *((lane, 1) for lane in lanes)):
        assert found["others"] == []
        sizes = []
        for what, batches in found["transfers"]:
            (batch,) = batches
            assert [kind for kind, *_ in batch] == [kind for kind in messages[what] for _ in range(peers)]
            # No message is a shape: all are rows of the language model's width, and there are no others.
            assert {tuple(rest) for _, _, *rest in batch} == {(32, "torch.float32")}
            sizes += [kind for kind, *_ in batch]
        assert sizes.count("isend") == sizes.count("irecv") == 6 * peers, "six microbatches, forth and back"
        assert not {"sum", "item", "_local_scalar_dense", "nonzero"} & found["operations"]


def test_no_image_is_no_message(pool: WorkerPool) -> None:
    for found in pool.run(record_transfers, ("--llm-dp", "2", *TEXT_ONLY), 3, world_size=3):
        assert found["transfers"] and all(batches == [] for _, batches in found["transfers"])
        assert found["others"] == []


# name -> (ranks, flags, then for a rank of the encoder and of the language model: messages that it sends for each
# microbatch, and its part of the rows of its replica)
LINKS = {"tp2-to-tp2": (4, "--encoder-tp 2 --llm-tp 2", (1, 1.0), (1, 1.0)),
         "tp2-to-tp2-between-hosts": (4, "--encoder-tp 2 --llm-tp 2", (1, 0.5), (1, 0.5)),
         "tp1-to-tp2": (3, "--llm-tp 2", (2, 1.0), (1, 0.5)),
         "tp2-to-dp2": (4, "--encoder-tp 2 --llm-dp 2", (2, 0.5), (2, 2.0)),
         "tp2-to-dp2-between-hosts": (4, "--encoder-tp 2 --llm-dp 2", (2, 0.5), (2, 1.0)),
         "dp2-to-tp2": (4, "--encoder-dp 2 --llm-tp 2 --micro-batch-size 2", (2, 2.0), (2, 0.5))}


def apart(rank: int, call: Any, *args: Any) -> Any:
    """Run `call(rank, *args)` as if each rank were on a host of its own."""
    from mimo.bridge import disjoint

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disjoint, "host_of_clock", lambda: f"host {rank}")
        return call(rank, *args)


@pytest.mark.parametrize("case", LINKS)
def test_each_rank_sends_its_part(pool: WorkerPool, case: str) -> None:
    world_size, flags, encoder, language = LINKS[case]
    call = (apart, record_transfers) if case.endswith("between-hosts") else (record_transfers,)
    ranks = pool.run(*call, (*flags.split(), "--mock-text-only-fraction", "0.0"), world_size, world_size=world_size)
    assert len({len(found["transfers"]) for found in ranks}) == 1
    totals = {"isend": 0, "irecv": 0}
    for found, (messages, part) in zip(ranks, (*[encoder] * (world_size - 2), *[language] * 2), strict=True):
        moved = {kind: [rows for _, batches in found["transfers"] for batch in batches
                        for each, rows, *_ in batch if each == kind] for kind in totals}
        totals = {kind: total + sum(moved[kind]) for kind, total in totals.items()}
        rows = [sum(peers) for peers in found["rows"]]
        assert len(moved["isend"]) == messages * len(rows)
        # Of an odd number of rows, one rank sends one more than another.
        assert abs(sum(moved["isend"]) - part * sum(rows)) <= len(rows) * messages / 2
    assert totals["isend"] == totals["irecv"]


def test_training_between_hosts_is_the_same(pool: WorkerPool) -> None:
    flags = ("--encoder-tp", "2", "--llm-tp", "2", "--sequence-parallel")
    for one, other in zip(pool.run(run_layout, flags, 4), pool.run(apart, run_layout, flags, 4), strict=True):
        assert (one.losses, one.grad_norms) == (other.losses, other.grad_norms)
        for mine, theirs in zip((*one.gradients, *one.parameters), (*other.gradients, *other.parameters), strict=True):
            assert mine.key == theirs.key and (mine.value == theirs.value).all(), mine.key


# When gradients are reduced

def record_reductions(rank: int, flags: tuple[str, ...], world_size: int) -> tuple[bool | None, int, list[list[str]]]:
    """Take two steps with overlapped reduction.

    Returns:
        Whether the schedule takes this rank for a first stage, its number of bucket groups, and for each step where
        each group's reduction started: in a `backward` pass, later in the `schedule`, or in `finalize`.
    """
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
    from megatron.core.pipeline_parallel import schedules

    from mimo.training.step import train_step
    from tests.support.prefetching import inside
    from tests.support.steps import trainer_of

    place = ["schedule"]
    starts: list[list[str]] = []

    start = _ParamAndGradBucketGroup.start_grad_sync

    def record_start(group: Any, *args: Any, **kwargs: Any) -> Any:
        if group.grad_reduce_handle is None:
            starts[-1].append(place[-1])
        return start(group, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        # Before the trainer is built, which keeps hold of the encoder's.
        patch.setattr(_ParamAndGradBucketGroup, "start_grad_sync", record_start)
        with trainer_of(rank, flags, world_size) as (parts, loader):
            model_config = parts.built.model.config
            assert model_config.grad_sync_func is not None
            backward = "backward_step_multimodule"
            patch.setattr(schedules, backward, inside(place, "backward", getattr(schedules, backward)))
            finalize = inside(place, "finalize", parts.grad_sync.finalize)
            patch.setattr(model_config, "finalize_model_grads_func", finalize)
            for _ in range(2):
                starts.append([])
                train_step(parts, loader.next_step())
            groups = sum(len(wrapped.bucket_groups) for wrapped in parts.built.wrapped.values())
            return parts.communicator.is_pp_first_stage, groups, starts


@pytest.mark.parametrize(("flags", "places"), [
    ("--llm-dp 2", ["finalize", "backward", "backward"]),
    ("--llm-pp 2", ["finalize", "backward", "schedule"]),
    ("--llm-dp 2 --encoder-ddp-overlap", ["backward", "backward", "backward"]),
])
def test_first_stages_reduce_gradients_in_their_last_backward_pass(pool, flags, places):
    """The first step only learns which gradients to expect; from then on a group starts as soon as it is complete."""
    overlap = ("--overlap-grad-reduce", "--ddp-num-buckets", "3", "--mock-text-only-fraction", "0.0")
    ranks = pool.run(record_reductions, (*flags.split(), *overlap), 3, world_size=3)
    for place, (is_first, groups, steps) in zip(places, ranks, strict=True):
        assert is_first == (place != "schedule")
        assert groups > 1 or place != "backward"
        assert steps[1] == [place] * groups


def test_overlap_on_later_stages(pool: WorkerPool) -> None:
    oracle = pool.run(run_oracle, (), world_size=1)[0]
    flags = ("--llm-pp", "2", "--encoder-dp", "2", "--micro-batch-size", "2", "--overlap-grad-reduce",
             "--encoder-ddp-overlap", "--ddp-num-buckets", "3")
    assert_equal(oracle, pool.run(run_layout, flags, 4))
