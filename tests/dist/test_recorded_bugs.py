"""Bugs that earlier trainers on separate grids had, each with the test that catches it. Numbers are the record's."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mimo.data.batch import EncoderBatch, Microbatch, PackedSequences, TextBatch
from tests.support.equality import MOE, Outcome, assert_equal, run_layout, run_oracle
from tests.support.global_state import assemble
from tests.support.marks import fast_only
from tests.support.spawn import WorkerPool

SOME_LANES = ("--dataset-provider", "tests.support.shaped_data:some_lanes")
TEXT_ONLY_LAST = ("--dataset-provider", "tests.support.shaped_data:text_only_last")


# 6: parameter groups of one module showed up in the others

def list_parameter_groups(rank: int, flags: tuple[str, ...], world_size: int) -> dict[str, list[str]]:
    """List what distinguishes the parameter groups of each module of this rank."""
    from tests.support.steps import inner_optimizers, trainer_of

    with trainer_of(rank, flags, world_size) as (parts, _):
        return {
            name: sorted(str(sorted((key, value) for key, value in group.items() if key != "params"))
                         for optimizer in inner_optimizers(info.optimizer) for group in optimizer.param_groups)
            for name, info in parts.optimizer.module_infos.items() if info.is_active
        }


def test_bug_6_each_module_has_only_its_own_parameter_groups(pool: WorkerPool) -> None:
    alone = pool.run(list_parameter_groups, ("--layout", "colocated"), 1, world_size=1)[0]
    ranks = pool.run(list_parameter_groups, ("--encoder-dp", "2", "--llm-dp", "2"), 4)
    for rank, groups in enumerate(ranks):
        module = "vision" if rank < 2 else "language"
        assert groups == {module: alone[module]}
    assert len(alone["vision"]) != len(alone["language"])


# 7: the first step brought back the values from before a load

def step_after_load(rank: int, flags: tuple[str, ...], world_size: int) -> dict[str, float]:
    """Load values, take one step with learning rate 0; the largest changes of main and model parameters."""
    from mimo.training.step import train_step
    from tests.support.steps import inner_optimizers, trainer_of

    with trainer_of(rank, flags, world_size) as (parts, loader):
        parameters = list(parts.built.model.parameters())
        with torch.no_grad():
            for parameter in parameters:
                parameter.mul_(1.25).add_(0.125)
        loaded = [parameter.detach().clone() for parameter in parameters]
        parts.optimizer.reload_model_params()
        optimizers = [inner for info in parts.optimizer.module_infos.values() if info.optimizer is not None
                      for inner in inner_optimizers(info.optimizer)]
        main = max(difference for optimizer in optimizers for difference in main_parameter_differences(optimizer))
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = 0.0
        result = train_step(parts, loader.next_step())
        assert result.success
        changes = [(now.detach() - before).abs().max().item() for now, before in zip(parameters, loaded, strict=True)]
        return {"main": main, "model": max(changes), "grad norm": result.grad_norm}


def main_parameter_differences(optimizer: Any) -> Iterator[float]:
    """Largest difference of each fp32 main parameter (or shard of one) from its bf16 model parameter."""
    state = vars(optimizer)
    if "shard_fp32_from_float16_groups" in state:
        for models, mains in zip(state["model_float16_groups"], state["shard_fp32_from_float16_groups"], strict=True):
            for model, main in zip(models, mains, strict=True):
                part = optimizer._get_model_param_range_map(model)["param"]
                yield (model.detach().view(-1)[part.start:part.end].float() - main.view(-1)).abs().max().item()
    else:
        for models, mains in zip(state["float16_groups"], state["fp32_from_float16_groups"], strict=True):
            for model, main in zip(models, mains, strict=True):
                assert main.dtype == torch.float32
                yield (model.detach().float() - main).abs().max().item()


@pytest.mark.parametrize("flags", ["--use-distributed-optimizer", "--no-use-distributed-optimizer"])
def test_bug_7_loaded_values_are_what_the_next_step_starts_from(pool: WorkerPool, flags: str) -> None:
    for found in pool.run(step_after_load, ("--bf16", "--llm-dp", "2", flags), 3, world_size=3):
        assert found["grad norm"] > 0
        assert (found["main"], found["model"]) == (0, 0)


# 8: bf16 gradients were accumulated in bf16

LARGE, SMALL, NUM_SMALL = 1.0, 2.0**-9, 15


def accumulate_small_gradients(rank: int, flags: tuple[str, ...], world_size: int) -> tuple[str, float, float]:
    """Accumulate a gradient of 1 and many of 2^-9; dtype, smallest and largest element of the reduced sum."""
    from tests.support.steps import trainer_of

    with trainer_of(rank, flags, world_size) as (parts, _):
        model = parts.built.model
        for wrapped in parts.built.wrapped.values():
            wrapped.zero_grad_buffer()

        def backward(value: float) -> None:
            torch.stack([(parameter * value).sum() for parameter in model.parameters()]).sum().backward()

        with model.no_sync():
            backward(LARGE)
            for _ in range(NUM_SMALL - 1):
                backward(SMALL)
        backward(SMALL)
        parts.grad_sync.finalize([model], force_all_reduce=True)
        gradients = [parameter.main_grad for parameter in model.parameters()]
        (dtype,) = {str(gradient.dtype) for gradient in gradients}
        return (dtype, min(gradient.min().item() for gradient in gradients),
                max(gradient.max().item() for gradient in gradients))


def test_bug_8_gradients_are_accumulated_and_reduced_in_fp32(pool: WorkerPool) -> None:
    flags = ("--bf16", "--layout", "colocated", "--encoder-dp", "2", "--llm-dp", "2")
    exact = float(2 * (np.float64(LARGE) + NUM_SMALL * np.float64(SMALL)))
    for found in pool.run(accumulate_small_gradients, flags, 2, world_size=2):
        assert found == ("torch.float32", exact, exact)
    coarse = (*flags, "--no-grad-reduce-in-fp32")
    for dtype, _, largest in pool.run(accumulate_small_gradients, coarse, 2, world_size=2):
        assert dtype == "torch.bfloat16" and largest != exact, "these gradients tell the two apart"


# 9: encoder gradients were diluted by ranks without images

def correction_factors(rank: int, dp: int) -> list[float]:
    from mimo.training.grad_sync import participation_correction

    return [participation_correction(torch.tensor(float(count)), dp).item() for count in range(dp + 1)]


def test_bug_9_participation_factors(pool: WorkerPool) -> None:
    (factors,) = pool.run(correction_factors, 4, world_size=1)
    assert factors == pytest.approx([1, 4, 2, 4 / 3, 1])


def run_with_factors(rank: int, flags: tuple[str, ...], world_size: int) -> tuple[Outcome, list[float]]:
    """`run_layout`, and the participation factor of each step on encoder ranks."""
    from mimo.training import grad_sync

    factors: list[float] = []
    correction = grad_sync.participation_correction

    def record(*args: Any) -> Any:
        factor = correction(*args)
        factors.append(factor.item())
        return factor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grad_sync, "participation_correction", record)
        return run_layout(rank, flags, world_size), factors


def test_bug_9_encoder_gradient_is_the_mean_over_tokens_whoever_saw_images(pool: WorkerPool) -> None:
    """Images on one of two encoder ranks, then on both, then on none."""
    oracle = pool.run(run_oracle, SOME_LANES, world_size=1)[0]
    flags = (*SOME_LANES, "--encoder-dp", "2", "--llm-dp", "2")
    found = pool.run(run_with_factors, flags, 4)
    assert_equal(oracle, [outcome for outcome, _ in found])
    assert all(factors == [] for _, factors in found)
    corrected = pool.run(run_with_factors, (*flags, "--correct-encoder-grad-for-partial-participation"), 4)
    assert [factors for _, factors in corrected] == [[2, 1, 1], [2, 1, 1], [], []]
    exact = assemble(oracle.gradients)
    for outcome, _ in corrected:
        for piece in outcome.gradients:
            factor = 2 if "modality_submodules" in piece.key else 1
            np.testing.assert_allclose(piece.value, factor * exact[piece.key][piece.slices], rtol=1e-3, atol=1e-6)


# 10: the fused router sums in another order in bf16, which sends tokens to other experts

def routing_of(rank: int, flags: tuple[str, ...]) -> list[tuple[bool, str, bool]]:
    """Say of each router whether it is fused, its dtype, and whether it routes fixed logits as the formula does."""
    from megatron.core.transformer.moe.router import TopKRouter

    from tests.support.steps import trainer_of

    with trainer_of(rank, ("--layout", "colocated", "--bf16", *flags), 1) as (parts, _):
        found = []
        for router in (part for part in parts.built.model.modules() if isinstance(part, TopKRouter)):
            logits = torch.randn(16, 1, router.config.num_moe_experts, generator=torch.Generator().manual_seed(3))
            chosen = router.routing(logits)[1]
            scores = logits[:, 0].sigmoid() + router.expert_bias if router.expert_bias is not None else logits[:, 0]
            expected = torch.zeros_like(chosen).scatter(1, scores.topk(router.topk, dim=-1).indices, True)
            found.append((router.config.moe_router_fusion, router.config.moe_router_dtype,
                          torch.equal(chosen, expected)))
        return found


@pytest.mark.parametrize("flags", [("--num-experts", "4"), ("--model-provider", "nemotron-moe-vlm-tiny")],
                         ids=["softmax", "sigmoid"])
def test_bug_10_routers_are_unfused_and_in_fp32(pool: WorkerPool, flags: tuple[str, ...]) -> None:
    (found,) = pool.run(routing_of, flags, world_size=1)
    assert found and set(found) == {(False, "fp32", True)}


# 22: tensors inside a batch stayed on the host

def all_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a dataclass, dictionary or sequence, at any depth."""
    if isinstance(value, torch.Tensor):
        yield value
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from all_tensors(getattr(value, field.name))
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from all_tensors(item)


def filled(kind: type, **given: Any) -> Any:
    """Return an instance whose tensor fields, and dictionaries of tensors, all hold one."""
    values = dict(given)
    for field in dataclasses.fields(kind):
        if str(field.type) == "torch.Tensor":
            values[field.name] = torch.zeros(2, 3)
        elif str(field.type) == "PackedSequences | None":
            values[field.name] = PackedSequences(torch.zeros(3), 2)
        elif str(field.type) == "dict[str, torch.Tensor]":
            values[field.name] = {"one": torch.zeros(2), "two": torch.zeros(3)}
        elif field.name == "inputs":
            values[field.name] = {"one": torch.zeros(2), "packed_seq_params": PackedSequences(torch.zeros(3), 2)}
    return kind(**values)


def test_bug_22_every_tensor_of_a_batch_moves() -> None:
    text = filled(TextBatch, keys=("a", "b"), token_counts={"vision": (1, 2)}, num_tokens=6)
    side = filled(EncoderBatch, keys=("a", "b"), token_counts=(1, 2), lane_sizes=(2,))
    batch = Microbatch(text, {"vision": side, "audio": filled(EncoderBatch, keys=(), token_counts=(), lane_sizes=())})
    moved = batch.to(torch.device("meta"))
    assert len(list(all_tensors(batch))) == len(list(all_tensors(moved))) == 4 + 1 + 2 + 2 + 2
    assert {tensor.device.type for tensor in all_tensors(moved)} == {"meta"}
    assert {tensor.device.type for tensor in all_tensors(batch)} == {"cpu"}, "the batch itself is left alone"
    assert moved.text is not None and moved.text.keys == ("a", "b") and moved.encoders["vision"].lane_sizes == (2,)
    assert Microbatch(None, {}).to(torch.device("meta")) == Microbatch(None, {})


# 23: the load-balancing loss was never recorded

LOAD_BALANCING = "seq_load_balancing_loss"
MOE_LAYOUTS = {"llm-ep2": (3, "--llm-dp 2 --llm-ep 2"), "llm-pp2": (3, "--llm-pp 2"),
               "llm-tp2": (4, "--encoder-tp 2 --llm-tp 2 --sequence-parallel"),
               "two-samples-a-microbatch": (3, "--encoder-dp 2 --micro-batch-size 2")}


def record_moe_losses(rank: int, flags: tuple[str, ...], world_size: int, run_dir: str) -> list[dict[str, float]]:
    from tests.support.steps import run_loop

    records = run_loop(rank, (*MOE, "--moe-per-layer-logging", *flags), world_size, run_dir)
    return [{key: value for key, value in record.to_dict().items() if "load_balancing" in key} for record in records]


def compute_moe_losses(rank: int, run_dir: str) -> tuple[list[dict[str, float]], list[float]]:
    """Train on one process; return its records and each layer's loss of the first step by its formula, in fp64.

    For a sequence of T tokens, E experts and k choices a token: E * sum_e (n_e / (k T)) * mean_t p_te, where n_e counts
    the tokens sent to expert e and p are the router's probabilities (Switch Transformer, equations 4 to 6). No token is
    padding.
    """
    from megatron.core.transformer.moe.router import TopKRouter

    layers: dict[int, list[float]] = {}
    forward = TopKRouter.forward

    def compute(router: Any, hidden: torch.Tensor, padding: torch.Tensor) -> Any:
        probabilities, choice = forward(router, hidden, padding)
        own = ~padding[:, 0]
        scores = torch.softmax(hidden.detach()[own, 0].double() @ router.weight.detach().double().T, dim=-1)
        experts, tokens = scores.shape[1], scores.shape[0]
        share = choice.detach()[own].double().sum(0) / (router.topk * tokens)
        layers.setdefault(router.layer_number, []).append((experts * (share * scores.mean(0)).sum()).item())
        return probabilities, choice

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TopKRouter, "forward", compute)
        recorded = record_moe_losses(rank, ("--layout", "colocated"), 1, run_dir)
    return recorded, [float(np.mean(layers[layer][:12])) for layer in sorted(layers)]


@pytest.fixture(scope="module")
def moe_losses(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    ((recorded, by_layer),) = pool.run(compute_moe_losses, str(tmp_path_factory.mktemp("moe")), world_size=1)
    assert len(by_layer) == 2
    first = recorded[0]
    assert [first[f"moe/{LOAD_BALANCING}_layer_{index}"] for index in range(2)] == pytest.approx(by_layer, rel=1e-5)
    assert first[LOAD_BALANCING] == pytest.approx(np.mean(by_layer), rel=1e-5)
    return recorded


@pytest.mark.parametrize("layout", fast_only(["llm-tp2"], MOE_LAYOUTS))
def test_bug_23_load_balancing_loss_is_recorded_and_equal_on_every_layout(pool, moe_losses, layout, tmp_path):
    world_size, flags = MOE_LAYOUTS[layout]
    ranks = pool.run(record_moe_losses, tuple(flags.split()), world_size, str(tmp_path), world_size=world_size)
    encoder_ranks = 2 if "--encoder" in flags else 1
    for records in ranks[encoder_ranks:]:
        for found, expected in zip(records, moe_losses, strict=True):
            assert found == pytest.approx(expected, rel=1e-4)
    assert f'"{LOAD_BALANCING}"' in (tmp_path / "metrics.jsonl").read_text()


# 28: a skipped step moved the learning rate

def run_with_bad_gradients(rank: int, run_dir: str) -> tuple[list[dict[str, Any]], list[float]]:
    """An infinite gradient on the second lane in iteration 2, a NaN on the encoder in iteration 3.

    Returns:
        The records, and a fingerprint of this rank's parameters after each iteration.
    """
    from tests.support.steps import run_loop

    bad = {2: (2, float("inf")), 0: (3, float("nan"))}
    prints: list[float] = []

    def spoil(parts: Any) -> None:
        prepare, step, iterations = parts.optimizer.prepare, parts.optimizer.step, itertools.count(1)

        def spoil_and_prepare() -> None:
            iteration, value = bad.get(rank, (0, 0.0))
            if next(iterations) == iteration:
                (wrapped,) = parts.built.wrapped.values()
                bucket = wrapped.buffers[0].buckets[0]
                # The first element of this rank's shard.
                bucket.grad_data.chunk(wrapped.dp_group.size())[wrapped.dp_group.rank()][0] = value
            prepare()

        def step_and_print() -> Any:
            result = step()
            parameters = parts.built.model.parameters()
            prints.append(sum(parameter.detach().double().abs().sum().item() for parameter in parameters))
            return result

        parts.optimizer.prepare, parts.optimizer.step = spoil_and_prepare, step_and_print

    flags = ("--llm-dp", "2", "--train-iters", "5", "--lr-decay-style", "linear")
    records = run_loop(rank, flags, 3, run_dir, spoil)
    return [record.to_dict() for record in records], prints


def test_bug_28_a_bad_gradient_on_one_rank_skips_the_step_on_all(pool: WorkerPool, tmp_path: Path) -> None:
    ranks = pool.run(run_with_bad_gradients, str(tmp_path), world_size=3)
    for records, prints in ranks:
        assert [record["success"] for record in records] == [True, False, False, True, True]
        assert [record["skipped-iterations"] for record in records] == [0, 1, 2, 2, 2]
        assert [record["consumed_samples"] for record in records] == [12, 12, 12, 24, 36]
        assert [record["grad-norm"] is None for record in records] == [False, True, True, False, False]
        rates = [record["learning-rate"] for record in records]
        assert rates[0] == rates[1] == rates[2] > rates[3] > rates[4]
        assert rates == [records["learning-rate"] for records in ranks[0][0]]
        assert prints[0] == prints[1] == prints[2], "no parameter changes in a skipped step"
        assert len({*prints}) == 3


def skip_with_router_bias(rank: int) -> list[dict[int, Any]]:
    """Expert biases before the first step, after it, and after a second one in which the first lane has a NaN."""
    from megatron.core.transformer.moe.router import TopKRouter

    from mimo.training.step import train_step
    from tests.support import equality, policy_moe

    config = equality.parse([*policy_moe.FLAGS, "--llm-dp", "2", "--seq-length", "24", "--mock-max-length", "20"])
    with equality.open_training(config, equality.validate(config, 2), rank) as (parts, loader):
        routers = {part.layer_number: part for part in parts.built.model.modules() if isinstance(part, TopKRouter)}
        prepare, spoils = parts.optimizer.prepare, iter((False, True))

        def spoil_and_prepare() -> None:
            if next(spoils) and rank == 0:
                (wrapped,) = parts.built.wrapped.values()
                wrapped.buffers[0].buckets[0].grad_data[0] = float("nan")
            prepare()

        parts.optimizer.prepare = spoil_and_prepare
        biases = [{layer: router.expert_bias.clone() for layer, router in routers.items()}]
        for taken in (True, False):
            assert train_step(parts, loader.next_step()).success is taken
            biases.append({layer: router.expert_bias.clone() for layer, router in routers.items()})
    return biases


def test_bug_28_a_skipped_step_leaves_the_routers_expert_bias(pool: WorkerPool) -> None:
    for before, taken, skipped in pool.run(skip_with_router_bias, world_size=2):
        (layer,) = before
        assert (taken[layer] != before[layer]).any() and (skipped[layer] == taken[layer]).all()


# 29: overlapped reduction of encoder gradients, with no image in the last microbatch of a rank

def test_bug_29_overlap_with_images_absent_on_some_encoder_ranks(pool: WorkerPool) -> None:
    oracle = pool.run(run_oracle, TEXT_ONLY_LAST, world_size=1)[0]
    flags = (*TEXT_ONLY_LAST, "--encoder-dp", "2", "--micro-batch-size", "2", "--overlap-grad-reduce",
             "--encoder-ddp-overlap", "--ddp-num-buckets", "3")
    assert_equal(oracle, pool.run(run_layout, flags, 3, world_size=3))
