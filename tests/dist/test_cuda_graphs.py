"""CUDA graphs of a decoder, on a CPU, where a replay calls the layers again with the same buffers.

That results equal those of one process is tested with all other layouts (test_equality.py and the tests of models).
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import deepseek
from tests.support.spawn import WorkerPool
from tests.support.steps import run_loop, trainer_of


def replays(rank: int, flags: tuple[str, ...], world_size: int, run_dir: str, row_multiple: int = 1
            ) -> tuple[Any, Counter[str], int, int]:
    """Train with graphs; return losses and gradient norms, how often each kind of pass ran, and shapes and slots.

    `row_multiple` is the number whose multiples attention can be captured for.
    """
    from mimo.model import cuda_graphs, layer_graphs

    ran: Counter[str] = Counter()
    found: list[Any] = []
    shapes, slots = set(), set()

    def watch(parts: Any) -> None:
        language = parts.built.wrapped["language"].module if "language" in parts.built.wrapped else None
        graphs = getattr(language, "decoder", None) and language.decoder.forward
        if not isinstance(graphs, cuda_graphs._DecoderGraphs):
            return
        found.append(graphs)
        run, capture = graphs.run, graphs._capture
        graphs._row_multiple = row_multiple

        def counted(**inputs: Any) -> torch.Tensor:
            ran["with gradients" if torch.is_grad_enabled() else "without"] += 1
            return run(**inputs)

        def noted(call: Any, slot: int) -> Any:
            shapes.add(graphs._key(call))
            slots.add(slot)
            return capture(call, slot)

        graphs.run, graphs._capture = counted, noted

    def count(patch: pytest.MonkeyPatch, kind: type, method: str, name: str) -> None:
        called = getattr(kind, method)
        patch.setattr(kind, method, lambda self, *args: (ran.update([name]), called(self, *args))[1])

    with pytest.MonkeyPatch.context() as patch:
        for kind in (cuda_graphs._Passes, layer_graphs.PassesOfLayers):
            count(patch, kind, "replay", "replayed")
        count(patch, cuda_graphs._DecoderGraphs, "register_gradients", "layers registered")
        for direction in ("forward", "backward"):
            count(patch, layer_graphs._LayerPasses, direction, f"layers {direction}")
        records = run_loop(rank, flags, world_size, run_dir, watch)
    for graphs in found:
        assert not graphs._busy, "a slot was not given back"
        assert not graphs._passes, "NCCL would wait for the graphs before it destroys their groups"
    return ([(record.lm_loss, record.grad_norm, record.moe_losses) for record in records], ran, len(shapes), len(slots))


def quick(cases: dict[str, Any], *names: str) -> list[Any]:
    """Mark all cases as slow but those that are named."""
    return [pytest.param(name, marks=() if name in names else pytest.mark.slow) for name in cases]


@pytest.mark.parametrize(("ranks", "grids", "slots"), [
    (1, ("--layout", "colocated"), 1), (3, ("--llm-pp", "2"), 2)], ids=["one-stage", "two-stages"])
def test_microbatches_of_a_shape_are_replayed_after_the_first(pool, tmp_path, ranks, grids, slots):
    flags = (*grids, "--row-lengths", "4", "--eval-interval", "3", "--eval-iters", "1", "--train-iters", "4")
    plain = pool.run(replays, flags, ranks, str(tmp_path / "plain"), world_size=ranks)
    found = pool.run(replays, (*flags, "--cuda-graphs"), ranks, str(tmp_path / "graphs"), world_size=ranks)
    assert [losses for losses, *_ in found] == [losses for losses, *_ in plain], "the same bits"
    with_language = [(ran, shapes, used) for _, ran, shapes, used in found if ran]
    assert len(with_language) == (2 if "--llm-pp" in grids else 1)
    for stage, (ran, shapes, used) in enumerate(with_language):
        # A replay on a CPU calls the layers, too. The first of two stages begins two microbatches before a backward
        # pass is over.
        plain_passes = 48 - ran["replayed"]
        assert 1 < shapes <= plain_passes <= shapes * (slots - stage) and ran["with gradients"] == 48
        assert ran["without"] == 24, "evaluations run without graphs"
        assert used == slots - stage, "one for each microbatch in flight"


@pytest.mark.parametrize("split", [
    pytest.param(("--llm-dp", "2"), id="whole"),
    pytest.param(("--llm-tp", "2", "--sequence-parallel"), id="parts", marks=pytest.mark.slow)])
def test_lengths_that_attention_cannot_be_captured_for_run_without_graphs(pool, tmp_path, split):
    flags = ("--layout", "homogeneous", *split, "--row-lengths", "8", "--train-iters", "4", "--cuda-graphs")
    ((losses, all_ran, all_shapes, _), _) = pool.run(replays, flags, 2, str(tmp_path / "all"), world_size=2)
    ((found, ran, shapes, _), _) = pool.run(replays, flags, 2, str(tmp_path / "some"), 16, world_size=2)
    ((_, none_ran, _, _), _) = pool.run(replays, flags, 2, str(tmp_path / "none"), 1000, world_size=2)
    assert found == losses and 1 <= shapes < all_shapes
    assert 0 == none_ran["replayed"] < ran["replayed"] < all_ran["replayed"]


def test_overlapped_collectives_have_the_first_and_the_last_microbatch_without_graphs(pool, tmp_path):
    flags = ("--layout", "homogeneous", "--llm-dp", "2", "--row-lengths", "1", "--train-iters", "4",
             "--overlap-grad-reduce", "--overlap-param-gather", "--ddp-num-buckets", "3")
    plain = pool.run(replays, flags, 2, str(tmp_path / "plain"), world_size=2)
    found = pool.run(replays, (*flags, "--cuda-graphs"), 2, str(tmp_path / "graphs"), world_size=2)
    for (losses, *_), (replayed, ran, *_) in zip(plain, found, strict=True):
        assert replayed == losses
        # Six microbatches a step, of which the second one of the first step is the first of its shape.
        assert ran["with gradients"] == 24 and ran["replayed"] == 4 * 4 - 1


EXPERTS = ("--num-experts", "4", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "32", "--moe-aux-loss-coeff", "0.1")


@pytest.mark.parametrize(("recomputed", "model"), [
    (("full",), ()), (("full", "--recompute-num-layers", "1"), EXPERTS),
    (("selective", "--recompute-modules", "core_attn,mlp"), ()), (("selective", "--recompute-modules", "moe"), EXPERTS),
    (("selective", "--recompute-modules", "moe,shared_experts"),
     ("--model-provider", "nemotron-moe-vlm-tiny", "--hybrid-layer-pattern", "ME*E", "--image-token-id", "95")),
    (("full",), ("--freeze", "vision,language")), (("none",), ("--fp8-format", "hybrid"))],
    ids=["full", "experts-1-of-2", "parts", "experts", "nested", "frozen", "fp8"])
def test_layers_that_recompute_or_round_are_replayed_with_the_same_bits(pool, tmp_path, model, recomputed):
    flags = ("--layout", "colocated", "--train-iters", "4", "--recompute", *recomputed, *model)
    ((losses, *_),) = pool.run(replays, flags, 1, str(tmp_path / "plain"), world_size=1)
    ((found, ran, _, _),) = pool.run(replays, (*flags, "--cuda-graphs"), 1, str(tmp_path / "graphs"), world_size=1)
    assert found == losses and ran["replayed"] > 24
    # Load-balancing losses are compared, too.
    assert bool(losses[0][2]) == (EXPERTS[0] in model or "ME*E" in model)


# One dense layer, and two with shared experts and a bias of the router.
DEEPSEEK = """--num-layers 3 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 48 --vocab-size 90
--q-lora-rank 12 --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 6 --num-experts 8
--moe-router-topk 4 --moe-router-num-groups 4 --moe-router-group-topk 2 --moe-ffn-hidden-size 20
--moe-shared-expert-intermediate-size 40 --first-k-dense-replace 1 --global-batch-size 8 --row-lengths 1""".split()
# An encoder whose levels three decoder layers add to their outputs.
TOWER = """--model-provider qwen3_vl --mrope-section 4 2 2 --num-query-groups 2 --kv-channels 16 --vision-patch-size 4
--vision-hidden-size 16 --vision-num-layers 4 --vision-num-attention-heads 2 --vision-ffn-hidden-size 20
--vision-num-position-embeddings 25 --vision-deepstack-layers 0 1 3 --image-token-id 95 --hidden-size 32
--num-attention-heads 4 --num-layers 4 --vocab-size 96 --mock-image-size 16"""
# Mamba-2, attention, dense, and two layers of experts with shared ones.
HYBRID = "--model-provider nemotron-moe-vlm-tiny --image-token-id 95 --hybrid-layer-pattern ME*-E"
# name -> (ranks, layers of a stage, flags)
EXCHANGES = {
    "ep2": (2, 2, "--llm-dp 2 --llm-ep 2 --row-lengths 2"),
    "ep2-pp2-overlap": (4, 1, "--llm-dp 2 --llm-ep 2 --llm-pp 2 --overlap-grad-reduce --ddp-num-buckets 2"),
    "tp2-ep2": (2, 2, "--llm-tp 2 --llm-ep 2 --sequence-parallel"),
    "tp2-expert-tp2": (2, 2, "--llm-tp 2 --llm-expt-tp 2 --sequence-parallel "
                              "--moe-router-load-balancing-type aux_loss"),
    "allgather": (2, 2, "--llm-dp 2 --llm-ep 2 --moe-token-dispatcher-type allgather"),
    "overlaps": (2, 2, "--llm-dp 2 --llm-ep 2 --overlap-grad-reduce --overlap-param-gather --ddp-num-buckets 3"),
    "recomputed": (2, 2, "--llm-dp 2 --llm-ep 2 --recompute selective --recompute-modules core_attn,moe"),
    "packed": (2, 2, "--llm-dp 2 --llm-ep 2 --mock-packed-length 64 --mock-images-max 0"),
    "fp8": (2, 2, "--llm-dp 2 --llm-ep 2 --fp8-format hybrid"),
    "hybrid": (2, 5, f"--llm-dp 2 --llm-ep 2 {HYBRID}"),
    "hybrid-packed-pp2": (4, 3, f"--llm-dp 2 --llm-ep 2 --llm-pp 2 {HYBRID}E --mock-packed-length 64 "
                                "--mock-images-max 1 --vision-num-layers 1"),
    "levels": (2, 4, f"--llm-dp 2 --llm-ep 2 {TOWER}"),
}


@pytest.mark.parametrize("case", quick(EXCHANGES, "ep2", "allgather", "hybrid-packed-pp2"))
def test_parts_of_layers_are_replayed_with_the_same_bits_if_ranks_exchange_tokens(pool, tmp_path, case):
    ranks, layers, more = EXCHANGES[case]
    flags = ("--layout", "homogeneous", "--train-iters", "3", "--eval-interval", "2", "--eval-iters", "1", *EXPERTS,
             *more.split())
    plain = pool.run(replays, flags, ranks, str(tmp_path / "plain"), world_size=ranks)
    found = pool.run(replays, (*flags, "--cuda-graphs"), ranks, str(tmp_path / "graphs"), world_size=ranks)
    assert len(found) == ranks and plain[0][0][0][2], "load-balancing losses are compared, too"
    for (losses, *_), (replayed, ran, *_) in zip(plain, found, strict=True):
        assert replayed == losses, "the same bits"
        assert ran["replayed"] > ran["with gradients"] / 3 and ran["without"] > 0
        assert ran["layers forward"] == ran["layers backward"] == ran["layers registered"] == layers * ran["replayed"]


STATIC = "--moe-token-dispatcher-type allgather --moe-static-rows"
# name -> (ranks, flags)
WHOLE = {
    "ep2": (2, "--llm-dp 2 --llm-ep 2"),
    "ep2-pp2": (4, "--llm-dp 2 --llm-ep 2 --llm-pp 2 --overlap-grad-reduce --ddp-num-buckets 2"),
    "tp2-ep4": (4, "--llm-tp 2 --llm-dp 2 --llm-ep 4 --sequence-parallel"),
    "recomputed": (2, "--llm-dp 2 --llm-ep 2 --recompute full"),
    "packed": (2, "--llm-dp 2 --llm-ep 2 --mock-packed-length 64 --mock-images-max 0 --global-batch-size 24"),
    "hybrid-packed": (2, f"--llm-dp 2 --llm-ep 2 {HYBRID} --mock-packed-length 64 --mock-images-max 1 "
                         "--vision-num-layers 1"),
}


@pytest.mark.parametrize("case", quick(WHOLE, "ep2", "packed"))
def test_whole_passes_are_replayed_on_all_ranks_or_none_if_the_host_need_not_know_sizes(pool, tmp_path, case):
    ranks, more = WHOLE[case]
    flags = ("--layout", "homogeneous", "--train-iters", "3", "--eval-interval", "2", "--eval-iters", "1", *EXPERTS,
             *STATIC.split(), *more.split())
    plain = pool.run(replays, flags, ranks, str(tmp_path / "plain"), world_size=ranks)
    found = pool.run(replays, (*flags, "--cuda-graphs"), ranks, str(tmp_path / "graphs"), world_size=ranks)
    for (losses, *_), (replayed, ran, *_) in zip(plain, found, strict=True):
        assert replayed == losses, "the same bits"
        assert 0 < ran["replayed"] < ran["with gradients"] and ran["layers forward"] == 0
    stages = {rank: found[rank][1]["replayed"] for rank in range(ranks)}
    assert len({stages[rank] for rank in range(ranks) if rank < ranks // (2 if "pp2" in case else 1)}) == 1


def shapes_of_peers(rank: int) -> Any:
    """Shapes of rows of two ranks as they are and as the ranks agree on them: number of starts and longest sequence."""
    from mimo.data.batch import PackedSequences
    from mimo.model.attention import packed_seq_params
    from mimo.model.graph_parts import HIDDEN, PACKED, Call

    flags = f"--layout homogeneous --llm-dp 2 --llm-ep 2 --cuda-graphs {' '.join(EXPERTS)} {STATIC}".split()
    with trainer_of(rank, tuple(flags), 2) as (parts, _):
        graphs = parts.built.wrapped["language"].module.decoder.forward

        def call(lengths: list[int], *, columns: int = 1) -> Any:
            numbers = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None]
            starts = torch.tensor([0, *lengths]).cumsum(0)
            packed = packed_seq_params(PackedSequences(starts, max(lengths), numbers), few_shapes=True)
            hidden = torch.zeros(sum(lengths), columns, 4, requires_grad=True)
            return Call.of({HIDDEN: hidden, PACKED: packed})

        found = []
        for both, columns in ((([8] * 4, [20, 4, 4, 4]), 1), (([8] * 4, [2] * 16), 1), (([8] * 4, [32]), 1),
                              (([8] * 4, [8] * 4), 1 + rank)):
            own = call(both[rank], columns=columns)
            agreed = graphs._agree(own, graphs._peers)
            found.append(None if agreed is None else (agreed.sequences, agreed.tensors["cu_seqlens"].tolist()))
        return found


def test_peers_agree_on_the_shape_of_packed_rows(pool: WorkerPool) -> None:
    first, second = pool.run(shapes_of_peers, world_size=2)
    # A longer sequence, more of them, a row without graphs, another number of rows.
    assert first == [((5, 31), [0, 8, 16, 24, 32]), ((17, 8), [0, 8, 16, 24, *[32] * 13]), None, None]
    assert second == [((5, 31), [0, 20, 24, 28, 32]), ((17, 8), list(range(0, 33, 2))), None, None]


def emulated_replays(rank: int, flags: tuple[str, ...], world_size: int, run_dir: str) -> Any:
    """Train as in `replays`, with graphs that replay recorded operations."""
    from mimo.model import cuda_graphs, layer_graphs
    from tests.support.graph_emulation import Emulation

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer_graphs, "borrowed", lambda tensor: tensor.data)
        patch.setattr(cuda_graphs, "PassesOfLayers", lambda *args: layer_graphs.PassesOfLayers(
            *args[:-1], Emulation().recorder))
        return replays(rank, flags, world_size, run_dir)


# name -> (ranks, layers of a stage, flags)
EMULATED = {"ep2": (2, 4, "--num-layers 4 --llm-dp 2 --llm-ep 2 --row-lengths 2"),
            "ep2-pp2": (4, 2, "--num-layers 4 --llm-dp 2 --llm-ep 2 --llm-pp 2 --row-lengths 1"),
            "recomputed": (2, 2, "--llm-dp 2 --llm-ep 2 --recompute selective --recompute-modules moe"),
            "hybrid": (2, 5, f"--llm-dp 2 --llm-ep 2 --row-lengths 1 {HYBRID}")}


@pytest.mark.parametrize("case", quick(EMULATED, "ep2-pp2", "hybrid"))
def test_recorded_operations_give_the_same_bits_although_memory_is_shared(pool, tmp_path, case):
    ranks, layers, more = EMULATED[case]
    flags = ("--layout", "homogeneous", "--train-iters", "3", *EXPERTS, *more.split())
    plain = pool.run(replays, flags, ranks, str(tmp_path / "plain"), world_size=ranks)
    found = pool.run(emulated_replays, (*flags, "--cuda-graphs"), ranks, str(tmp_path / "graphs"), world_size=ranks)
    for (losses, *_), (replayed, ran, *_) in zip(plain, found, strict=True):
        assert replayed == losses, "the same bits"
        assert ran["layers backward"] == layers * ran["replayed"] > 0


def replays_with_latent_attention(rank: int, flags: tuple[str, ...], world_size: int, run_dir: str) -> Any:
    """Train as in `replays`, with latent attention, which has no graphs on GPUs because of its cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.support.equality.parse_config", deepseek.parse_config)
        patch.setattr("mimo.config.validate._check_graphs", lambda config: None)
        patch.setattr("mimo.model.cuda_graphs._unsupported_reason", lambda model, impl, static_rows: "")
        return replays(rank, flags, world_size, run_dir)


@pytest.mark.parametrize("recompute", [
    (), ("--recompute", "selective", "--recompute-modules", "mlp,shared_experts")], ids=["kept", "recomputed"])
def test_shared_experts_and_dense_layers_are_captured_too(pool, tmp_path, recompute):
    flags = ("--llm-dp", "2", "--llm-ep", "2", "--train-iters", "3", *DEEPSEEK, *recompute)
    run = replays_with_latent_attention
    plain = pool.run(run, flags, 2, str(tmp_path / "plain"), world_size=2)
    found = pool.run(run, (*flags, "--cuda-graphs"), 2, str(tmp_path / "graphs"), world_size=2)
    for (losses, *_), (replayed, ran, *_) in zip(plain, found, strict=True):
        assert replayed == losses
        assert ran["layers forward"] == ran["layers backward"] == 3 * ran["replayed"] > 0


@pytest.mark.parametrize("model", [
    ("--mock-images-max", "0"),
    ("--model-provider", "nemotron-moe-vlm-tiny", "--hybrid-layer-pattern", "ME*-M", "--image-token-id", "95",
     "--vision-num-layers", "1")], ids=["dense", "hybrid"])
def test_packed_rows_are_replayed_with_the_same_bits(pool: WorkerPool, tmp_path: Path, model: tuple[str, ...]) -> None:
    flags = ("--layout", "colocated", "--seq-length", "64", "--mock-packed-length", "64", "--mock-images-max", "1",
             "--train-iters", "4", *model)
    ((losses, *_),) = pool.run(replays, flags, 1, str(tmp_path / "plain"), world_size=1)
    ((found, ran, shapes, _),) = pool.run(replays, (*flags, "--cuda-graphs"), 1, str(tmp_path / "graphs"), world_size=1)
    assert found == losses
    # Two to four samples a row, whose longest one has at most 16, 32 or 63 tokens.
    assert ran["with gradients"] == 48 and 48 - ran["replayed"] <= 12 and shapes >= 2


def passes_without_backward(rank: int) -> tuple[list[int], int]:
    """Run forward passes whose results are dropped, and some that are kept; return the slots in use after each."""
    with trainer_of(rank, ("--layout", "colocated", "--cuda-graphs"), 1) as (parts, loader):
        graphs = parts.built.wrapped["language"].module.decoder.forward
        batch, used, kept = loader.next_step()[0], [], []
        from mimo.training.step import begin_schedule

        for keeps in (False, False, True, True, False):
            begin_schedule(parts, [batch])
            output = parts.built.model(batch)
            if not used:
                output.sum().backward()
            if keeps:
                kept.append(output)
            del output
            used.append(len(graphs._busy))
        return used, len({slot for _, slot in graphs._passes})


def test_a_pass_that_is_dropped_gives_its_slot_back(pool: WorkerPool) -> None:
    ((used, slots),) = pool.run(passes_without_backward, world_size=1)
    # The first pass of the shape has no slot, and only its backward pass lets others have one.
    assert used == [0, 0, 1, 2, 2] and slots == 3


def refused(rank: int, flags: tuple[str, ...], world_size: int) -> str:
    """Return the error with which a model is not built if its flags say nothing against graphs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mimo.config.validate._check_graphs", lambda config: None)
        try:
            with trainer_of(rank, (*flags, "--layout", "colocated", "--cuda-graphs"), world_size):
                return ""
        except ValueError as error:
            return str(error)


def test_built_layers_that_draw_random_numbers_are_refused(pool: WorkerPool) -> None:
    (error,) = pool.run(refused, ("--hidden-dropout", "0.1"), 1, world_size=1)
    assert error == ("--cuda-graphs: dropout and random routing draw numbers, which a replay would repeat; leave it "
                     "out")


def test_built_layers_whose_parts_cannot_be_captured_are_refused(pool: WorkerPool) -> None:
    flags = ("--encoder-dp", "2", "--llm-dp", "2", "--llm-ep", "2", *EXPERTS, "--recompute", "full")
    errors = pool.run(refused, flags, 2, world_size=2)
    assert errors == ["--cuda-graphs: with experts on several ranks, layers that are recomputed as a whole have no "
                      "graphs; leave it out"] * 2
