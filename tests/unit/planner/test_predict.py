"""Predictions of step time and memory: closed formulas, what was measured on two H200, and the command."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest

from mimo.commands.main import main
from mimo.config.trainer import RunConfig
from mimo.config.validate import layers_of_stages, validate
from mimo.grid.windows import BACKWARD_COST, Image, deal_in_order, deal_iteration, encoding_cost
from mimo.observability.flops import SequenceSums
from mimo.planner.activations import Windows, image_bytes
from mimo.planner.candidates import BEST, HOMOGENEOUS, Candidate, Found, Search, cuts
from mimo.planner.costs import (
    EXCHANGE_SHARE,
    EXPERT_EFFICIENCY,
    EXPERT_READ_BYTES,
    GIB,
    GRADIENT_GB_S,
    HOST_EXCHANGE_S,
    HOST_EXPERTS_S,
    HOST_FORWARD_S,
    LATENCY_S,
    LAUNCH_S,
    Costs,
    Profile,
    Ratios,
)
from mimo.planner.gpus import GPUS
from mimo.planner.measure import _line, _split, trainings_of
from mimo.planner.memory_lines import memory_line
from mimo.planner.predict import Prediction, Step, predict
from mimo.planner.simulation import simulate
from mimo.planner.transfers import transfers
from mimo.planner.workload import SampleSize, draw_samples, iterations, longest_in_windows
from scripts.bench import presets
from tests.support.planning import H200, config_of, predicted, searched, step_of

# Costs that `mimo plan --measure` found for the preset 10b-uneven on two H200 with Transformer Engine.
PROFILE = Path(__file__).with_name("h200_profile.json")
PP2 = "--layout colocated --encoder-dp 2 --llm-pp 2"
# Rows of --seq-length tokens, as in most measurements.
WHOLE_ROWS = "--row-lengths 1"


def drawn(config: RunConfig, count: int) -> list[SampleSize]:
    return draw_samples(config, Costs(config, H200).provider, count)


def predicted_preset(preset: str, flags: str, profile: Profile = H200, gpus: int = 2) -> Prediction:
    config = config_of(f"{WHOLE_ROWS} {flags}", preset)
    return predicted(config, gpus, drawn(config, 24), profile)


def test_a_frozen_encoder_that_prefetches_delays_nobody() -> None:
    frozen = "--freeze vision --encoder-dp 1 --llm-dp 1"
    for layers, of_encoder in ((4, False), (120, True)):
        step = step_of(config_of(f"{WHOLE_ROWS} --vision-num-layers {layers} {frozen} --encoder-prefetch-depth 2",
                                 "h200-even"), 2)
        costs = step.costs
        (batch,) = step.batches(drawn(step.config, 12))
        encoder = costs.encoder("vision", 1)
        images = [tokens for microbatch in batch for tokens in microbatch[0][0].images]
        forward = 12 * encoder.forward.call_s + sum(
            costs.image_flops("vision", tokens)[0] * encoder.forward.flop_s for tokens in images)
        backward = sum(costs.image_flops("vision", tokens)[1] * encoder.backward.flop_s for tokens in images)
        language = 12 * (step.language_s("forward", 0, 4096) + step.language_s("backward", 0, 4096))
        assert (forward > language) == of_encoder
        # The projector trains. Nothing else waits for it than the encoder itself.
        slower = forward + backward if of_encoder else language
        assert slower <= simulate(step.programs(batch), transfers(step, batch)).seconds < 1.01 * slower
    found = [predicted_preset("h200", f"{frozen} --microbatch-order read {more}").step_s
             for more in ("", "--encoder-prefetch-depth 1")]
    assert found[1] < 0.99 * found[0]


def test_a_plan_lets_a_frozen_encoder_prefetch(capsys: pytest.CaptureFixture[str]) -> None:
    run = [*presets.PRESETS["h200"], "--bf16", "--train-iters", "1", "--gpu", "H200", "--gpus", "2", "--top", "200"]
    assert main(["plan", *run, "--freeze", "vision"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "--llm-" in line]
    assert any(line.split("  ")[-1].startswith("--encoder-dp 1 --llm-dp 1 ")
               and line.endswith("--encoder-prefetch-depth 2") for line in lines)
    assert any(line.split("  ")[-1].startswith("--encoder-dp 1 --llm-dp 1") and "prefetch" not in line
               for line in lines), "prefetch may also cost time"
    assert all("prefetch" not in line for line in lines if "--layout" in line)
    # The trainer refuses prefetch of an encoder that trains, so its disjoint layouts are predicted without it.
    for flags in ([], ["--encoder-prefetch-depth", "2"]):
        assert main(["plan", *run, *flags]) == 0
        found = [line for line in capsys.readouterr().out.splitlines() if line.startswith("disjoint")]
        assert found and all("--encoder-prefetch-depth 2" not in line for line in found)


def test_short_microbatches_at_both_ends_leave_less_to_wait_for() -> None:
    def seconds(preset: str, flags: str) -> list[float]:
        return [predicted_preset(preset, f"{flags} --microbatch-order {order}").step_s for order in ("images", "read")]

    homogeneous = "--layout homogeneous --llm-pp 2 --llm-pp-layout 13,27"
    # The host takes as long to launch the encoder's pass over one image as over several, so disjoint grids gain less.
    for preset, flags, most in (("h200", "--encoder-dp 1 --llm-dp 1", 0.99), ("10b-uneven", homogeneous, 0.98)):
        ordered, read = seconds(preset, flags)
        assert ordered < most * read, (preset, ordered, read)
    # Equal microbatches keep their order, as do those of encoder windows.
    for preset, flags in (("10b-even", homogeneous), ("10b-uneven", PP2)):
        ordered, read = seconds(preset, flags)
        assert ordered == read, (preset, ordered, read)


@pytest.mark.parametrize(("preset", "flags", "most"), [
    ("10b-uneven", f"{PP2} --encoder-window 2 --encoder-activation-gib 24", 0.95),
    ("10b-even", f"{PP2} --encoder-window 2", 0.99),
    ("10b-even", "--layout homogeneous --llm-pp 2 --llm-pp-layout 10,30", 0.98)])
def test_neighbours_of_similar_length_leave_less_to_wait_for(preset: str, flags: str, most: float) -> None:
    def seconds(more: str) -> dict[str, float]:
        configs = {order: config_of(f"{flags} --microbatch-order {order} {more}", preset)
                   for order in ("lengths", "images", "read")}
        return {order: predicted(config, 2, drawn(config, 48), H200).step_s for order, config in configs.items()}

    found = seconds("--cuda-graphs")
    assert found["lengths"] < most * min(found["images"], found["read"]), found
    # Rows that all have --seq-length tokens leave nothing to order by length.
    found = seconds(WHOLE_ROWS)
    assert found["lengths"] == found["images"]


def test_a_shortened_iteration_in_order_of_length_stands_for_the_whole_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for flags, error in ((f"{PP2} --encoder-window 2 --encoder-activation-gib 24", 0.03),
                         ("--layout homogeneous --llm-pp 2 --llm-pp-layout 10,30", 0.03)):
        config = config_of(f"{flags} --global-batch-size 128 --cuda-graphs --microbatch-order lengths", "10b-uneven")
        # The same 64 samples twice, so that the first half of an iteration has the images of the whole one.
        samples = drawn(config, 64) * 2
        short = predicted(config, 2, samples)
        monkeypatch.setattr("mimo.planner.predict.ORDERED_ITERATION", 128)
        whole = predicted(config, 2, samples)
        monkeypatch.undo()
        assert short.step_s == pytest.approx(whole.step_s, rel=error)
        # Here the longest two of 128 are one of 64 twice, which is the worst case.
        assert -5 < short.memory_gib - whole.memory_gib <= 0.01


def test_a_layout_without_stages_takes_the_sum_of_its_passes() -> None:
    config = config_of(f"{WHOLE_ROWS} --layout homogeneous", "10b-even")
    step = step_of(config, 1)
    costs, samples = step.costs, drawn(config, 12)
    (batch,) = iterations(samples, config, step.layout, num_lanes=1, num_microbatches=12)
    encoder, cost = costs.encoder("vision", 1), costs.language(1, 1)
    expected = 12 * (40 * (cost.forward_s + cost.backward_s) + cost.ends_forward_s + cost.ends_backward_s)
    for sample in samples:
        expected += encoder.forward.call_s + encoder.backward.call_s
        for tokens in sample.images:
            forward, backward = costs.image_flops("vision", tokens)
            expected += forward * encoder.forward.flop_s + backward * encoder.backward.flop_s
    assert simulate(step.programs(batch), transfers(step, batch)).seconds == pytest.approx(expected)


@pytest.mark.parametrize(("provider", "layers"), [
    ("--model-provider nemotron-moe-vlm-20l", 20),
    ("--model-provider llava --num-layers 6 --num-experts 16 --moe-router-topk 2 --moe-ffn-hidden-size 512", 6)])
def test_experts_and_layers_of_several_kinds_are_not_counted_as_further_layers(provider: str, layers: int) -> None:
    config = config_of(f"{provider} --seq-length 4096")
    step = step_of(config, 2)
    costs = step.costs
    assert step.layers == (layers,) and layers_of_stages(config, step.layout) == (layers,)
    flops = sum(forward for component, forward, _ in costs.counter.passes(
        "language", SequenceSums.of_rows([[4096]], 4096)) if component.recomputed)
    cost = step.pass_cost
    with_experts = {20: 8, 6: 6}[layers]
    host_s = layers * HOST_FORWARD_S + with_experts * HOST_EXPERTS_S["auto"] / 3
    weights_s = sum(math.prod(shape.shape) * shape.count for shape in costs.shapes["language"]
                    if shape.split == "expert") * EXPERT_READ_BYTES / (GRADIENT_GB_S * 1e9)
    assert step.language_s("forward", 0, 4096) - cost.ends_forward_s == pytest.approx(
        max(flops / (GPUS["H200"].tflops * 1e12 * EXPERT_EFFICIENCY["auto"]) + weights_s, host_s))


# A step in milliseconds and GiB at the peak, measured on one H200 (docs/performance_experts.md).
QWEN_MOE = """--model-provider causal_lm --num-layers 8 --hidden-size 2048 --num-attention-heads 32 --num-query-groups 4
--kv-channels 128 --ffn-hidden-size 6144 --qk-layernorm --vocab-size 151936 --num-experts 128 --moe-router-topk 8
--moe-ffn-hidden-size 768 --dataset-provider mock --mock-text-only-fraction 1 --seq-length 4096 --global-batch-size 16
"""


# Four commands with packed experts and one row took 1,107 to 1,412 ms.
@pytest.mark.parametrize(("gemm", "rows", "graphs", "step_ms", "peak_gib"), [
    ("packed", 4, "", 854, 117.9), ("packed", 1, "", 1238, 100.1), ("cutlass", 1, "", 2280, 100.2),
    ("packed", 4, "--cuda-graphs", 814, 119.1), ("packed", 1, "--cuda-graphs", 965, 100.8)])
def test_mixtures_of_experts_that_were_measured(gemm, rows, graphs, step_ms, peak_gib):
    config = config_of(f"{QWEN_MOE} --micro-batch-size {rows} --moe-gemm {gemm} {graphs} {WHOLE_ROWS}")
    found = predicted(config, 1, [SampleSize(4096)] * 16)
    assert found.step_s * 1000 == pytest.approx(step_ms, rel=0.08)
    assert found.memory_gib == pytest.approx(peak_gib, rel=0.05)
    assert found.parts_s["optimizer"] == pytest.approx(0.105, rel=0.1)


# The same in FP8, and how much shorter the step of a dense model is.
@pytest.mark.parametrize(("rows", "flags", "step_ms", "peak_gib"), [
    (4, "", 760, 124.0), (1, "", 938, 110.0),
    (4, "--fp8-output-proj", 697, 129.8), (1, "--fp8-output-proj", 871, 111.1)])
def test_experts_in_fp8_that_were_measured(rows: int, flags: str, step_ms: float, peak_gib: float) -> None:
    config = config_of(f"{QWEN_MOE} --micro-batch-size {rows} {WHOLE_ROWS} --cuda-graphs --fp8-format hybrid {flags}")
    found = predicted(config, 1, [SampleSize(4096)] * 16)
    assert found.step_s * 1000 == pytest.approx(step_ms, rel=0.06)
    # Predictions with four rows are 3 to 4 % above the measured peaks.
    assert found.memory_gib == pytest.approx(peak_gib, rel=0.04)


@pytest.mark.parametrize(("recipe", "ratio"), [("tensorwise", 2526 / 1955), ("blockwise", 2588 / 2214)])
def test_a_dense_model_is_faster_in_fp8(recipe: str, ratio: float) -> None:
    def step_s(flags: str) -> float:
        config = config_of(f"""--model-provider causal_lm --num-layers 28 --hidden-size 3072 --ffn-hidden-size 8192
            --num-attention-heads 24 --num-query-groups 8 --vocab-size 128256 --dataset-provider mock
            --mock-text-only-fraction 1 --seq-length 4096 --global-batch-size 16 --micro-batch-size 2 --cuda-graphs
            {WHOLE_ROWS} {flags}""")
        return predicted(config, 1, [SampleSize(4096)] * 16).step_s

    assert step_s("") / step_s(f"--fp8-format hybrid --fp8-recipe {recipe}") == pytest.approx(ratio, rel=0.03)


def test_fp8_makes_layers_faster_where_it_is_and_needs_copies_of_what_trains() -> None:
    flags = "--model-provider llava --encoder-dp 1 --llm-dp 1 --seq-length 4096"
    plain, layers, images, frozen = (Costs(config_of(f"{flags} {more}"), H200) for more in (
        "", "--fp8-format hybrid", "--encoder-fp8-format hybrid", "--fp8-format hybrid --freeze language"))
    assert layers.language(1, 1).forward_s < 0.85 * plain.language(1, 1).forward_s
    assert layers.language(1, 1).ends_forward_s == plain.language(1, 1).ends_forward_s
    assert images.language(1, 1) == plain.language(1, 1)
    for forward in (0, 2):
        assert images.image_s("vision", 1, 577)[forward] < 0.9 * plain.image_s("vision", 1, 577)[forward]
        assert layers.image_s("vision", 1, 577) == plain.image_s("vision", 1, 577)
    assert layers.fp8_copies("language") and not layers.fp8_copies("vision") and not frozen.fp8_copies("language")
    with pytest.raises(ValueError, match=r"--fp8-format hybrid \(tensorwise\): A100 has no FP8 products"):
        Costs(config_of(f"{flags} --fp8-format hybrid"), Profile(GPUS["A100"]))


def test_primary_weights_in_fp8_have_bfloat16_ones_only_in_updates() -> None:
    flags = "--model-provider causal_lm --fp8-format hybrid --dataset-provider mock --mock-text-only-fraction 1"
    flags += " --llm-tp 2"

    def peak(more: str, length: int) -> float:
        step = step_of(config_of(f"{flags} --fp8-output-proj --seq-length {length} {more}"), 2)
        return step.memory(step.batches([SampleSize(length)] * step.config.train.global_batch_size))[0]

    step = step_of(config_of(f"{flags} --fp8-primary-weights"), 2)
    layers = sum(shape.count * math.prod(shape.shape) for shape in step.costs.shapes["language"]
                 if shape.stage == "layer" and len(shape.shape) == 2)
    (module,) = next(iter(step.places()))[1]
    others = 2 * sum(count for count, _ in step.trained(*module)) - layers
    assert step.released_bytes(*module) == layers and step.update_bytes(*module) == layers + others
    assert peak("", 4096) - peak("--fp8-primary-weights", 4096) == layers, "two bytes, on two ranks"
    more = peak("--fp8-primary-weights", 2) - peak("", 2)
    assert 0.9 * others < more <= others, "without activations, an update has the other weights twice"


# The same with its experts on four and two H200, and as many rows for each.
@pytest.mark.parametrize(("gpus", "rows", "flags", "step_ms", "peak_gib"), [
    (4, 4, "alltoall", 1028, 52.3), (4, 1, "alltoall", 2175, 34.0), (4, 1, "alltoall --cuda-graphs", 1550, None),
    (4, 1, "allgather --cuda-graphs", 1240, None), (4, 4, "allgather --cuda-graphs", 896, None),
    (2, 1, "allgather --cuda-graphs --moe-static-rows", 949, 57.1),
    (4, 1, "allgather --cuda-graphs --moe-static-rows", 976, 39.5),
    (4, 4, "allgather --cuda-graphs --moe-static-rows", 869, 75.1)])
def test_experts_on_several_ranks_that_were_measured(gpus, rows, flags, step_ms, peak_gib):
    config = config_of(f"{QWEN_MOE} --global-batch-size {16 * gpus} --micro-batch-size {rows} {WHOLE_ROWS} "
                       f"--llm-dp {gpus} --llm-ep {gpus} --moe-token-dispatcher-type {flags}")
    found = predicted(config, gpus, [SampleSize(4096)] * 16 * gpus)
    assert found.step_s * 1000 == pytest.approx(step_ms, rel=0.065)
    assert peak_gib is None or found.memory_gib == pytest.approx(peak_gib, rel=0.08)


@pytest.mark.parametrize("gemm", ["packed", "cutlass", "separate"])
def test_the_host_launches_kernels_of_the_experts_of_a_rank(gemm: str) -> None:
    # So little work that the host is the limit.
    costs = Costs(config_of(f"{QWEN_MOE} --seq-length 64 --moe-gemm {gemm}"), H200)
    least = HOST_EXPERTS_S["packed"]
    for ep, share in ((1, 1.0), (2, 0.5), (8, 0.125)):
        moved = costs.language(1, 1, ep).forward_s - (HOST_FORWARD_S + least / 3) - (ep > 1) * HOST_EXCHANGE_S / 3
        assert moved == pytest.approx((HOST_EXPERTS_S[gemm] - least) * share / 3, abs=60e-6)


def test_recomputed_parts_take_time_and_give_memory() -> None:
    def cost(modules: str) -> tuple[float, float]:
        recompute = f"--recompute selective --recompute-modules {modules}" if modules else ""
        found = Costs(config_of(f"{QWEN_MOE} {recompute}"), H200).language(1, 4)
        return found.layer_bytes, found.backward_s

    (whole, time), (attention, _) = cost(""), cost("core_attn")
    assert attention == whole
    layer = {name: cost(name) for name in ("moe_act", "layernorm", "moe", "layernorm,moe_act")}
    # Per token: top-8 inputs of 768 channels, two norms of 2048, in 2 bytes.
    assert whole - layer["moe_act"][0] == pytest.approx(4 * 4096 * 8 * 768 * 2)
    assert whole - layer["layernorm"][0] == pytest.approx(4 * 4096 * 2 * 2048 * 2)
    assert layer["layernorm,moe_act"][0] == pytest.approx(layer["moe_act"][0] + layer["layernorm"][0] - whole)
    assert layer["moe"][0] < layer["moe_act"][0] and layer["moe_act"][1] == time < layer["moe"][1]


def test_the_encoder_gets_numbers_of_ranks_that_the_trainer_takes() -> None:
    config = config_of(f"{WHOLE_ROWS} --global-batch-size 768", "10b-even")
    search = Search(config, Costs(config, H200), [SampleSize(2000, (144,))] * 8, 264)
    sizes = search._encoder_sizes()
    # 13 would be the encoder's share, but 251 ranks divide neither 768 samples nor 40 layers.
    assert sizes == [8, 24]
    for size in sizes:
        assert any(search.accepted(replace(config, layout=layout)) for layout in search._disjoint(size))
    assert not any(search.accepted(replace(config, layout=layout)) for layout in search._disjoint(12))


@pytest.mark.parametrize(("gpus", "tried"), [(8, {2, 4, 8}), (64, {4, 8, 16})])
def test_expert_parallelism_is_about_as_large_as_a_node(gpus: int, tried: set[int]) -> None:
    config = config_of(f"{QWEN_MOE} --global-batch-size 64")
    search = Search(config, Costs(config, H200), [SampleSize(4096)], gpus)
    assert {layout.llm_ep for layout in search._language(1, gpus, 1)} == tried


@pytest.mark.parametrize(("flags", "width"), [("", 2688), ("--moe-latent-size 1024", 1024)])
def test_experts_of_other_nodes_take_the_network_and_layers_without_experts_nothing(flags: str, width: int) -> None:
    costs = Costs(config_of(f"""--model-provider nemotron-moe-vlm-54l --dataset-provider mock --mock-images-max 0
    --seq-length 16384 --global-batch-size 64 {flags}"""), H200)
    gpu, routed = GPUS["H200"], 16384 * 6 * width * 2 / 16
    weights_s = sum(math.prod(shape.shape) * shape.count for shape in costs.shapes["language"]
                    if shape.split == "expert") / 54 * EXPERT_READ_BYTES / (GRADIENT_GB_S * 1e9)
    waits = {ep: costs.language(1, 1, ep).forward_s - costs.language(1, 1).forward_s + weights_s * (1 - 1 / ep)
             for ep in (8, 16)}
    # Half of the 54 layers have experts; their tokens go there and back, and are sorted on both sides.
    link_gb_s, sorting_s = EXCHANGE_SHARE * gpu.link_gb_s, routed * 16 * 2 / (GRADIENT_GB_S * 1e9)
    assert waits[8] == pytest.approx(routed * 2 * 7 / (link_gb_s * 1e9) + sorting_s + LATENCY_S)
    assert waits[16] == pytest.approx(routed * (7 / link_gb_s + 8 / gpu.network_gb_s) / 1e9 + sorting_s + LATENCY_S)


def test_weights_gradients_and_moments_are_18_bytes_of_a_parameter_and_shards_12_less() -> None:
    config = config_of("--layout homogeneous --llm-dp 2", "10b-even")
    step = step_of(config, 2)
    ((_, place),) = step.places()
    parameters = sum(count for each in place for count, _ in step.parameters(*each))
    assert sum(step.state_bytes(*each) for each in place) == pytest.approx(parameters * (2 + 4 + 12 / 2))
    one = Step(replace(config, optim=replace(config.optim, use_distributed_optimizer=False)), step.layout, step.costs)
    assert sum(one.state_bytes(*each) for each in place) == pytest.approx(18 * parameters)


def test_balanced_windows_are_not_slower_than_images_in_order() -> None:
    free, in_order, budget = (predicted_preset("10b-uneven", f"{PP2} --encoder-window 2 {more}") for more in (
        "", "--no-encoder-balance", "--encoder-activation-gib 5"))
    assert free.step_s < in_order.step_s
    # A smaller budget of activations takes less memory and more time.
    assert budget.memory_gib < free.memory_gib - 10 and budget.step_s > free.step_s
    assert free.encoder_gib * GIB > 20e9


@pytest.mark.parametrize("given", ["--recompute selective", "--recompute full --recompute-num-layers 8"])
def test_a_run_with_recomputation_of_its_own_still_gets_a_budget_for_images(given: str) -> None:
    config = config_of(given, "10b-uneven")
    found = searched(config, 2, drawn(config, 24), Profile(replace(GPUS["H200"], memory_gib=120.0)))
    fitting = [each.config for each in found if each.fits]
    assert any(each.layout.encoder_activation_gib is not None for each in fitting)
    assert any(each.model.encoder_recompute == "full" and each.layout.encoder_window is None for each in fitting)
    for each in found:
        assert each.config.model == replace(config.model, encoder_recompute=each.config.model.encoder_recompute,
                                            cuda_graphs=each.config.model.cuda_graphs)


@pytest.mark.parametrize(("flags", "depths", "sizes", "rows"), [
    ("causal_lm", {2, 6}, {1, 2, 4, 8}, {1, 2}),
    # The levels of its encoder go to three layers.
    ("qwen3_vl --mock-image-size 64", {3, 7}, {1, 2, 4, 8}, {1, 2}),
    # Three dense layers come before those with experts.
    ("deepseek_v3", {4, 8}, {1, 2, 4, 8}, {1, 2}),
    ("causal_lm --hidden-size 896 --num-attention-heads 14 --num-query-groups 2", {2, 6}, {1, 2}, {1, 2}),
    ("causal_lm --mock-packed-length 512", {2, 6}, {1, 2, 4, 8}, {1}),
    ("causal_lm --min-lr 1e-5 --train-iters 9 --lr-decay-style WSD --lr-wsd-decay-iters 3 --lr-wsd-decay-style linear",
     {2, 6}, {1, 2, 4, 8}, {1, 2}),
    ("causal_lm --num-experts 8 --llm-dp 8 --llm-ep 8 --moe-static-rows --moe-token-dispatcher-type allgather",
     {2, 6}, {1, 2, 4, 8}, {1, 2}),
], ids=["plain", "levels", "dense-layers", "heads", "packed", "schedule", "static-rows"])
def test_a_profile_is_measured_in_trainings_that_the_trainer_accepts(
        flags: str, depths: set[int], sizes: set[int], rows: set[int]) -> None:
    config = config_of(f"--dataset-provider mock --seq-length 4096 --model-provider {flags}")
    found = trainings_of(config, 8)
    assert {each.model_family.num_layers for each in found} == depths
    assert {each.layout.llm_tp for each in found} == sizes and {each.train.micro_batch_size for each in found} == rows
    assert len(found) == len(depths) * len(sizes) * len(rows)
    for each in found:
        validate(each, 8)


def test_a_model_that_cannot_be_measured_is_refused_before_any_training() -> None:
    config = config_of("--model-provider causal_lm --dataset-provider mock --max-position-embeddings 64 "
                       "--seq-length 4096")
    with pytest.raises(ValueError, match="no layout of 2 GPUs can be measured; the first one was refused: .*4096"):
        trainings_of(config, 2)


def test_all_layers_of_a_hybrid_model_are_recomputed_or_none() -> None:
    config = config_of("--model-provider nemotron_h --dataset-provider mock --mock-images-max 0 --global-batch-size 8 "
                       "--seq-length 4096 --hybrid-layer-pattern M*M*M*M*M*M*")
    found = searched(config, 2, [SampleSize(4000)], Profile(replace(GPUS["H200"], memory_gib=30.0)))
    recomputed = [each.config for each in found if each.config.model.recompute == "full"]
    assert recomputed and all(each.fits for each in found)
    for each in recomputed:
        assert each.model.recompute_num_layers is None
        validate(each, 2)


def test_a_frozen_encoder_gets_no_budget_and_keeps_its_layouts() -> None:
    config = config_of(f"--freeze vision,projector {WHOLE_ROWS}", "10b-uneven")
    found = searched(config, 2, drawn(config, 24), Profile(replace(GPUS["H200"], memory_gib=90.0)))
    windows = [each.config for each in found if each.config.layout.encoder_window is not None and each.fits]
    assert any(each.model.recompute == "full" for each in windows)
    for each in found:
        assert each.config.layout.encoder_activation_gib is None and each.config.model.encoder_recompute == "none"


def test_the_search_has_every_kind_and_more_gpus_are_faster() -> None:
    config = config_of("", "10b-even")
    best = []
    for gpus in (2, 4):
        found = searched(config, gpus, drawn(config, 12))
        assert {each.kind for each in found} == {"homogeneous", "colocated", "disjoint"}
        assert all(each.fits is (each.prediction.memory_gib * 2**30 <= GPUS["H200"].usable_bytes) for each in found)
        for each in found[:5]:
            again, given = config_of(each.flags, "10b-even"), each.config
            assert (again.layout, again.train.micro_batch_size) == (given.layout, given.train.micro_batch_size)
        cuts = [each.config.layout.llm_pp_layout for each in found if each.kind == HOMOGENEOUS]
        assert any(cut for cut in cuts), "uneven cuts are among them"
        best.append(found[0].prediction.step_s)
    assert best[1] < 0.6 * best[0]


@pytest.mark.parametrize(("flags", "gib"), [("", 134.5), ("--microbatch-order lengths", 110.0)])
def test_a_search_predicts_what_each_of_its_layouts_has_alone(flags: str, gib: float) -> None:
    """Layouts of a search share iterations and windows where these do not differ."""
    config = config_of(flags, "10b-uneven")
    profile, samples = Profile(replace(GPUS["H200"], memory_gib=gib)), drawn(config, 24)
    for each in searched(config, 2, samples, profile):
        again = predict(each.config, validate(each.config, 2), Costs(each.config, profile), samples)
        assert again == each.prediction, each.flags


def test_packed_rows_are_one_a_microbatch() -> None:
    config = config_of("""--model-provider nemotron-moe-vlm-tiny --dataset-provider mock --mock-packed-length 512
    --seq-length 512 --mock-image-size 64 --global-batch-size 8""")
    samples = drawn(config, 16)
    assert all(sample.is_packed and 300 < sample.num_tokens <= 512 for sample in samples)
    assert {each.config.train.micro_batch_size for each in searched(config, 2, samples)} == {1}


@pytest.mark.slow
def test_many_gpus_leave_out_only_what_cannot_be_among_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("--global-batch-size 96", "10b-uneven")
    samples = drawn(config, 48)
    search = Search(config, Costs(config, H200), samples, 24)
    short = search.run()
    monkeypatch.setattr(Found, "is_hopeless", lambda *_: False)
    whole = searched(config, 24, samples)
    assert len(whole) == len(short) + search.slow and search.slow > len(whole) / 8
    assert [each.flags for each in short[:BEST]] == [each.flags for each in whole[:BEST]]
    for kind in {each.kind for each in whole}:
        first = [[each.flags for each in found if each.kind == kind][:3] for found in (short, whole)]
        assert first[0] == first[1]


def test_what_the_trainer_refuses_keeps_no_other_layout_out(monkeypatch: pytest.MonkeyPatch) -> None:
    # Sequence parallelism cannot divide an odd length, and layouts with tensor parallelism have it.
    config = config_of("--global-batch-size 96 --seq-length 4095", "10b-uneven")
    samples = drawn(config, 48)
    search = Search(config, Costs(config, H200), samples, 24)
    found = search.run()
    assert len(found) > BEST and search.refused and all(each.config.layout.llm_tp == 1 for each in found)
    for each in found:
        validate(replace(each.config, train=replace(each.config.train, dry_run=True)), 24)
    monkeypatch.setattr(Found, "is_hopeless", lambda *_: False)
    whole = searched(config, 24, samples)
    assert [each.flags for each in found[:BEST]] == [each.flags for each in whole[:BEST]]


def test_a_data_set_that_refuses_every_layout_says_why(capsys, monkeypatch):
    def refuse(*_: object) -> None:
        raise ValueError("the data has 3 samples")

    monkeypatch.setattr("mimo.planner.candidates.check_data", refuse)
    assert main(["plan", "--gpus", "2", *presets.PRESETS["smallest"], "--no-bf16"]) == 2
    assert "no layout of 2 GPUs works; the last one was refused: the data has 3 samples" in capsys.readouterr().err


def test_a_plan_refuses_experts_that_are_split(capsys: pytest.CaptureFixture[str]) -> None:
    flags = f"{QWEN_MOE} --bf16 --train-iters 1 --llm-tp 2 --sequence-parallel --llm-expt-tp 2"
    assert main(["plan", "--gpus", "2", *flags.split()]) == 2
    assert "mimo plan does not support --llm-expt-tp 2" in capsys.readouterr().err


def test_pixels_of_the_first_windows_take_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    step, sizes = (step_of(config_of(PP2, preset), 2) for preset in ("10b-even", "10b-uneven"))
    image = 3 * 672 * 672 * 2
    # While a pipeline of two stages fills, windows of one, one and two microbatches travel, with five images in each.
    assert image_bytes(step, step.batches(drawn(step.config, 12)))[:2] == (20 * image, 10 * image)
    assert image_bytes(sizes, [[[[SampleSize(100, (144, 36))]]] * 12])[:2] == (5 * image, 2.5 * image)
    monkeypatch.setattr("mimo.planner.activations.has_eight_bit_pixels", lambda config, provider: True)
    assert image_bytes(sizes, [[[[SampleSize(100, (144, 36))]]] * 12])[:2] == (2.5 * image, 1.25 * image)


# Peak GiB of long videos on H100 (scripts/bench/long_rows.py): GPUs, layout, tokens of a row, recomputed layers.
LONG_ROWS = [
    (1, "", 15304, 0, 67.48), (1, "", 18976, 0, 75.04), (2, "--llm-cp 2", 32768, 0, 59.58),
    (2, "--llm-cp 2", 44440, 0, 71.62), (2, "--llm-cp 2", 131072, 22, 70.23),
    # On H200, without cosines and sines of rotary positions in every layer.
    (2, "--llm-tp 2 --sequence-parallel", 86992, 0, 107.26),
    *((2, "--llm-tp 2 --sequence-parallel", *figures)
      for figures in ((32768, 0, 53.36), (65536, 8, 72.22), (131072, 21, 70.56)))]


@pytest.mark.parametrize(("gpus", "layout", "length", "recomputed", "measured"), LONG_ROWS)
def test_memory_of_long_videos_is_near_what_was_measured(gpus, layout, length, recomputed, measured):
    """Norms of queries and keys, projectors of a frozen tower and features were missing once: up to 13 GiB."""
    frames = (length - 600) // 196 * 2
    recompute = f"--recompute full --recompute-num-layers {recomputed}" if recomputed else ""
    config = config_of(f"""--seq-length {length} --mock-video-min-frames {frames} --mock-video-frames {frames}
    --global-batch-size 1 --layout colocated --encoder-dp {gpus} --encoder-window 1 {layout} {recompute}""",
                       "long-video")
    found = predicted(config, gpus, drawn(config, 1)).memory_gib
    assert abs(found - measured) < 0.05 * measured and found > measured - 2


def test_a_homogeneous_layout_without_stages_reaches_its_bound() -> None:
    alone = predicted_preset("10b-even", "--layout homogeneous", Profile.load(PROFILE), gpus=1)
    assert alone.bound_s == pytest.approx(alone.step_s)


@pytest.mark.parametrize(("images", "row"), [((144,) * 7, 4096), ((16,), 3072)])
def test_the_bound_of_a_colocated_pipeline_is_that_of_the_formula(images: tuple[int, ...], row: int) -> None:
    step = step_of(config_of(PP2, "10b-uneven"), 2)
    costs = step.costs
    # 12 microbatches in 8 windows: two of one microbatch at both ends, four of two between them.
    # Rows of 3000 tokens of text and these images are multiples of 256 tokens.
    encoder, cost = costs.encoder("vision", 1), costs.language(1, 1, length=row)
    forward, backward = costs.image_flops("vision", images[0])
    encoding = 12 * len(images) * (forward * encoder.forward.flop_s + backward * encoder.backward.flop_s) / 2
    encoding += 8 * (encoder.forward.call_s + encoder.backward.call_s)
    head = cost.ends_forward_s + cost.ends_backward_s
    passes = 20 * (cost.forward_s + cost.backward_s)
    # The first stage waits for a forward pass of the second one, which has the output layer, and for a backward pass.
    pipeline = 12 * (passes + head) + passes
    found = step.bound_s([[[SampleSize(3000, images)]]] * 12, {})
    assert found == pytest.approx(max(pipeline, 12 * (passes + head) + encoding))
    assert (found > 1.01 * pipeline) == (len(images) > 1)


@pytest.mark.parametrize("balance", ["", "--no-encoder-balance"])
def test_images_of_tiles_are_dealt_to_replicas_whole_as_the_trainer_deals_them(balance: str) -> None:
    config = config_of(f"""--model-provider llava_next --dataset-provider mock --mock-image-size 600 --seq-length 4096
    --global-batch-size 12 {PP2} --encoder-window 2 {balance}""")
    step = step_of(config, 2)
    each = config.model_family.num_patches
    rng = random.Random(0)
    samples = [SampleSize(100, (each,) * sum(tiles), tiles=tiles) for tiles in (
        tuple(rng.choice((3, 4, 5)) for _ in range(rng.randrange(4))) for _ in range(12))]
    batch = [[[sample]] for sample in samples]
    dealt = Windows(step, batch)
    windows = [[Image(0, microbatch, 9, (1, 1), (tiles, 3, 336, 336)) for microbatch in window
                for tiles in samples[microbatch].tiles] for window in dealt.schedule.windows]
    work = [[encoding_cost(image, 1024) for image in images] for images in windows]
    owners = ([deal_in_order(images, 2) for images in work] if balance
              else deal_iteration(work, dealt.schedule, 2, backward=BACKWARD_COST))
    tile_s = step.encoder_s("forward", step.layout.encoders[0], [each], calls=0)
    call_s = step.costs.encoder("vision", 1).forward.call_s
    expected = []
    for images, replicas in zip(work, owners, strict=True):
        shares = [[cost for cost, owner in zip(images, replicas, strict=True) if owner == each] for each in range(2)]
        expected.append([sum(share) * tile_s + bool(share) * call_s for share in shares])
    assert [[own.seconds for own in window] for window in dealt.work()[0]] == [pytest.approx(each) for each in expected]


def test_samples_say_which_tiles_belong_to_an_image() -> None:
    samples = drawn(config_of("""--model-provider llava_next --dataset-provider mock --mock-images-mean 2
    --mock-images-max 4 --mock-images-cv 0.5 --mock-image-size 400 --mock-image-size-cv 0.6 --seq-length 4096"""), 20)
    assert len({tiles for sample in samples for tiles in sample.tiles}) > 1
    for sample in samples:
        assert [len(image) for image in sample.whole_images] == list(sample.tiles)
        assert [tokens for image in sample.whole_images for tokens in image] == list(sample.images)
    assert SampleSize(1, (4, 9)).whole_images == [(4,), (9,)]


def test_cuts_leave_the_first_stage_room_for_the_encoder() -> None:
    # The encoder takes as long as nine and a half of 40 layers, the logits as long as three.
    found = cuts(40, 2, 9.5, 3.2)
    assert found[0] == (17, 23) and set(found[1:3]) == {(16, 24), (18, 22)}
    assert cuts(40, 2, 0.0, 3.2)[0] == (22, 18)
    first = cuts(40, 4, 9.5, 3.2)[0]
    assert sum(first) == 40 and first[1] == first[2] and first[0] < first[3] < first[1]


@pytest.mark.parametrize(("flags", "undone"), [("", ""), ("--encoder-prefetch-depth 2", " --encoder-prefetch-depth 0")])
def test_a_cut_that_fits_is_tried_where_the_fastest_ones_do_not(flags: str, undone: str) -> None:
    # Balanced, this encoder leaves the first stage three layers, and the second one needs more memory than there is.
    config = config_of(flags, "10b-uneven")
    found = searched(config, 2, drawn(config, 48), Profile.load(PROFILE))
    pipelines = [each for each in found if each.kind == HOMOGENEOUS and "--llm-pp-layout" in each.flags]
    assert not any(each.fits for each in pipelines if "--llm-pp-layout 3,37" in each.flags)
    best = next(each for each in pipelines if each.fits)
    assert best.flags == f"--layout homogeneous --llm-pp 2 --llm-pp-layout 10,30{undone}"


def test_a_plan_has_cuda_graphs_where_they_pay_and_may_be_used() -> None:
    def flags_of(more: str) -> list[str]:
        config = config_of(more, "10b-uneven")
        found = searched(config, 2, drawn(config, 48), Profile.load(PROFILE))
        assert len({each.flags.replace(" --cuda-graphs", "") for each in found}) == len(found), "each layout once"
        return [each.flags for each in found if each.fits]

    short, whole = flags_of(""), flags_of(WHOLE_ROWS)
    assert short[0].startswith("--layout colocated") and "--cuda-graphs" in short[0]
    assert any("--llm-pp 2" in each and "--cuda-graphs" not in each for each in short)
    assert len([each for each in short if "--cuda-graphs" in each]) > len([each for each in whole if "graphs" in each])
    for refused in ("--transformer-impl local", "--attention-dropout 0.1"):
        assert not any("--cuda-graphs" in each for each in flags_of(refused))


def test_a_plan_gathers_tokens_where_that_sends_less() -> None:
    def found(flags: str = "") -> dict[int, Candidate]:
        config = config_of(f"{QWEN_MOE} --micro-batch-size 4 --global-batch-size 64 {flags}")
        return {each.config.layout.llm_ep: each for each in reversed(searched(config, 4, [SampleSize(4096)] * 64))
                if each.config.train.micro_batch_size == 4 and each.config.layout.llm_dp == 4}

    def gathers(candidate: Candidate) -> bool:
        return "--moe-token-dispatcher-type allgather" in candidate.flags

    # A token goes to its experts and back in two bytes, or to all ranks in two and back in as many, or in four.
    assert {ep: gathers(each) for ep, each in found().items()} == {1: False, 2: True, 4: True}
    assert {ep: gathers(each) for ep, each in found("--moe-router-topk 4").items()} == {1: False, 2: True, 4: False}
    six = "--moe-router-topk 6"
    assert {ep: gathers(each) for ep, each in found(six).items()} == {1: False, 2: True, 4: True}
    assert not gathers(found(f"{six} --moe-gemm separate")[4])
    # Rows would have the length of --seq-length.
    assert not any(map(gathers, found("--row-lengths 4").values()))
    given = found("--moe-token-dispatcher-type allgather")[4]
    assert not gathers(given) and given.prediction == found()[4].prediction


def test_a_plan_gathers_tokens_within_a_node_only() -> None:
    config = config_of(f"{QWEN_MOE} --moe-router-topk 32")
    search = Search(config, Costs(config, H200), [SampleSize(4096)], 16)
    for ep, tried in ((1, 0), (8, 1), (16, 0)):
        run = replace(config, layout=replace(config.layout, llm_dp=16, llm_ep=ep))
        assert len(list(search._with_gathered_tokens(run))) == tried


def test_a_plan_has_graphs_where_ranks_exchange_tokens() -> None:
    flags = """--model-provider causal_lm --num-layers 8 --hidden-size 2048 --num-attention-heads 32 --vocab-size 32000
        --num-experts 16 --moe-ffn-hidden-size 768 --dataset-provider mock --mock-text-only-fraction 1
        --seq-length 512 --global-batch-size 8"""
    found = searched(config_of(flags), 2, [SampleSize(512)] * 8)
    split, whole = ([each.flags for each in found if ("--llm-ep" in each.flags) == is_split]
                    for is_split in (True, False))
    assert any("--cuda-graphs" in each for each in split) and any("--cuda-graphs" in each for each in whole)

    def gain(layout: str) -> float:
        graphs, plain = (predicted(config_of(f"{flags} --llm-dp 2 {layout} {more}"), 2, [SampleSize(512)]).step_s
                         for more in ("--cuda-graphs", ""))
        return plain - graphs

    # Graphs contain parts of these layers, and nothing is known about --llm-expt-tp.
    assert 0 < gain("--llm-ep 2") < gain("") and gain("--llm-expt-tp 2") == 0


def test_static_rows_need_memory_and_not_the_host() -> None:
    def found(flags: str) -> Prediction:
        config = config_of(f"{QWEN_MOE} --global-batch-size 64 {WHOLE_ROWS} --llm-dp 4 --llm-ep 4 --cuda-graphs "
                           f"--moe-token-dispatcher-type allgather {flags}")
        return predicted(config, 4, [SampleSize(4096)] * 64)

    counted, static = found(""), found("--moe-static-rows")
    assert static.step_s < 0.8 * counted.step_s
    # Of eight layers, each keeps four times the rows of eight experts for each of 4,096 tokens: two products with
    # outputs of 1,536 and 2,048 channels and their inputs, of which the larger counts.
    kept = 8 * 3 * 8 * 4096 * (2048 + 2048) * 2 / 2**30
    # One of them has gradients besides, half as much.
    assert static.memory_gib - counted.memory_gib == pytest.approx(kept * (1 + 0.5 / 8), rel=0.01)


def test_a_plan_has_static_rows_where_the_host_is_the_limit() -> None:
    def flags_of(more: str) -> dict[tuple[int, int], str]:
        found = searched(config_of(f"{QWEN_MOE} --global-batch-size 64 {more}"), 4, [SampleSize(4096)] * 64)
        return {(each.config.layout.llm_ep, each.config.train.micro_batch_size): each.flags for each in found
                if each.config.layout.llm_dp == 4}

    found, separate = flags_of(""), flags_of("--moe-gemm separate")
    assert all("--moe-static-rows --cuda-graphs" in found[ep, 1] for ep in (2, 4))
    assert not any("--moe-static-rows" in flags for flags in (found[1, 1], found[4, 4], *separate.values()))

    # A100 have no product for all experts.
    config = config_of(f"{QWEN_MOE} {WHOLE_ROWS} --moe-token-dispatcher-type allgather --cuda-graphs")
    run = replace(config, layout=replace(config.layout, llm_dp=2, llm_ep=2))
    for gpu, tried in (("H200", 1), ("A100", 0)):
        search = Search(config, Costs(config, Profile(GPUS[gpu])), [SampleSize(4096)], 2)
        assert len(list(search._with_static_rows(run))) == tried


@pytest.mark.parametrize("tp", [1, 2])
def test_short_rows_wait_for_the_host_unless_graphs_launch_their_kernels(tp: int) -> None:
    def passes_s(length: int, more: str = "") -> float:
        config = config_of(f"""--model-provider causal_lm --num-layers 8 --hidden-size 2048 --num-attention-heads 32
            --ffn-hidden-size 6144 --vocab-size 32000 --dataset-provider mock --mock-text-only-fraction 1
            --seq-length {length} --max-position-embeddings {length} --global-batch-size 4 --llm-tp {tp}
            {"--sequence-parallel" if tp > 1 else ""} {more}""")
        parts = predicted(config, tp, [SampleSize(length)]).parts_s
        return parts["passes"] + parts.get("waiting", 0.0)

    launches = 4 * 8 * sum(LAUNCH_S[tp > 1])
    assert passes_s(64) == pytest.approx(launches) and passes_s(64, "--cuda-graphs") < launches / 2
    assert passes_s(65536) == pytest.approx(passes_s(65536, "--cuda-graphs"))


def test_overlapped_collectives_leave_fewer_microbatches_with_graphs() -> None:
    def launch_s(more: str = "") -> float:
        config = config_of(f"--global-batch-size 4 --layout homogeneous {more}", "10b-even")
        return step_of(config, 1).launch_s("forward", 0, 256)

    plain = launch_s()
    assert plain == pytest.approx(40 * LAUNCH_S[False][0]) and launch_s("--cuda-graphs") == 0
    for flags, share in (("--overlap-grad-reduce", 1 / 4), ("--overlap-grad-reduce --overlap-param-gather", 1 / 2)):
        assert launch_s(f"--cuda-graphs {flags}") == pytest.approx(share * plain)


@pytest.mark.parametrize(("host_bound", "ratio"), [(0.0, 3.0), (0.5, 2.0), (1.0, 1.0)])
def test_a_profile_of_a_gpu_that_waited_says_little_about_graphs(host_bound: float, ratio: float) -> None:
    config = config_of("", "10b-even")
    measured = Ratios(1, 1, forward=3.0, backward=3.0, host_bound=host_bound)
    plain, profiled = (Costs(config, Profile(GPUS["H200"], modules=modules)).language(1, 1, graphs=1.0)
                       for modules in ({}, {"language": [measured]}))
    assert profiled.forward_s == pytest.approx(ratio * plain.forward_s)


def test_a_plan_file_has_layouts_with_and_without_graphs(tmp_path: Path) -> None:
    flags = [*presets.PRESETS["10b-uneven"], "--bf16", "--train-iters", "1"]
    assert main(["plan", *flags, "--gpu", "H200", "--gpus", "2", "--out", str(tmp_path / "plan.json")]) == 0
    layouts = json.loads((tmp_path / "plan.json").read_text())["layouts"]
    forms = {each["flags"] for each in layouts if "--llm-tp 2" in each["flags"] and "homogeneous" in each["flags"]}
    assert {"--layout homogeneous --llm-tp 2 --sequence-parallel",
            "--layout homogeneous --llm-tp 2 --sequence-parallel --cuda-graphs"} <= forms


def test_an_encoder_that_runs_ahead_does_not_wait_for_gradients() -> None:
    samples = [SampleSize(1500, (144,) * 9)] * 12
    plain, ahead = (predicted(config_of(f"--llm-pp 2 --encoder-run-ahead {number}", "10b-even"), 3, samples)
                    for number in (0, 2))
    # The encoder is the slowest stage; it has two microbatches more in flight.
    assert ahead.step_s < plain.step_s and ahead.memory_gib > plain.memory_gib
    assert ahead.parts_s["encoding"] == pytest.approx(plain.parts_s["encoding"])
    assert ahead.parts_s["waiting"] < 0.8 * plain.parts_s["waiting"]


def test_experts_are_on_fewer_ranks_than_the_rest() -> None:
    step = step_of(config_of("""--model-provider causal_lm --dataset-provider mock --mock-text-only-fraction 1
    --num-experts 8 --moe-ffn-hidden-size 64 --llm-dp 4 --llm-ep 2"""), 4)
    (dense, four), (experts, two) = step.parameters("language", step.layout.language, 0)
    assert (four, two) == (4, 2) and dense > 0 and experts > 0
    assert step.state_bytes("language", step.layout.language, 0) == dense * (6 + 12 / 4) + experts * (6 + 12 / 2)


def test_large_layouts_are_predicted_from_some_of_their_lanes() -> None:
    times = []
    for dp in (4, 64):
        config = config_of(f"--global-batch-size {16 * dp} --layout homogeneous --llm-dp {dp} --llm-tp 2 "
                           "--sequence-parallel", "10b-even")
        found = predicted(config, 2 * dp, [SampleSize(1500, (144,) * 5)] * 64)
        times.append(found.parts_s["passes"])
        assert found.tokens_per_s == pytest.approx(16 * 2220 / found.step_s / 2)
    assert times[0] == pytest.approx(times[1])


def test_ratios_of_two_depths_and_of_images() -> None:
    # Two layers take 10, six take 18: each layer 2, the rest 6.
    assert _split([2, 6], [10.0, 18.0], 1.0, 3.0) == pytest.approx((2.0, 2.0))
    assert _split([4, 4], [10.0, 10.0], 2.0, 2.0) == pytest.approx((1.0, 1.0))
    assert _line([(1.0, 3.0), (2.0, 5.0), (4.0, 9.0)]) == pytest.approx((1.0, 2.0))
    assert _line([(2.0, 4.0), (2.0, 6.0)]) == pytest.approx((0.0, 2.5))


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run = [*presets.PRESETS["smallest"], "--no-bf16"]
    assert main(["plan", "--gpus", "2", "--gpu", "H200", "--plan-steps", "2", *run]) == 0
    text = capsys.readouterr().out
    assert "2 GPUs: H200" in text and "estimated from the data sheet" in text and "Separate grids" in text
    assert "yours" not in text and "own flags" not in text
    assert "this is the speed of bfloat16, and products in float32 (--no-bf16) take" in text
    assert main(["plan", "--gpus", "2", *run, "--layout", "colocated", "--encoder-dp", "2", "--llm-pp", "2"]) == 0
    assert "yours" in capsys.readouterr().out
    assert main(["plan", "--gpus", "2", *run, "--encoder-dp", "1", "--llm-dp", "1", "--encoder-window", "2"]) == 2
    assert "--encoder-window 2" in capsys.readouterr().err
    # A layout of another size is not the run's.
    assert main(["plan", "--gpus", "2", *run, "--encoder-dp", "2", "--llm-dp", "2"]) == 0
    other = capsys.readouterr().out
    assert "yours" not in other and "The grids of the run's own flags need 4 GPUs, so they are not predicted" in other
    tiled = ["--model-provider", "llava_next", "--dataset-provider", "mock", "--mock-image-size", "600",
             "--mock-images-mean", "1", "--mock-images-max", "1", "--seq-length", "4096"]
    assert main(["plan", "--gpus", "2", "--gpu", "H200", "--plan-steps", "1", *tiled]) == 0
    assert "5.0 tiles of images each" in capsys.readouterr().out
    assert main(["plan", "--gpus", "2", "--profile", str(PROFILE), "--json", *run]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["profile"]["gpu"]["name"] == "NVIDIA H200" and len(found["layouts"]) > 10
    wrong, old = tmp_path / "profile.json", tmp_path / "old.json"
    wrong.write_text("{}")
    old.write_text(json.dumps({name: value for name, value in json.loads(PROFILE.read_text()).items()
                               if name != "version"}))
    for flags, message in ((["--gpus", "2", "--profile", str(wrong)], "not a profile"),
                           (["--gpus", "2", "--profile", str(old)], "measured by version 1 of the planner"),
                           (["--gpus", "2", "--nodes", "1"], "--gpus 2 and --nodes 1: give one of them"),
                           ([], "--gpus 0 and --nodes 0: give one of them"),
                           (["--gpus", "2", "--gpu-memory-gib", "0"], "--gpu-memory-gib 0.0 is not above 0")):
        assert main(["plan", *flags, *run]) == 2
        assert message in capsys.readouterr().err
    for given, message in (((), "None fits into 1 GiB, even if all layers are recomputed: use more GPUs"),
                           (("--recompute", "selective"), "None fits into 1 GiB with --recompute selective: leave")):
        assert main(["plan", "--gpus", "2", "--gpu-memory-gib", "1", *run, *given]) == 1
        assert message in capsys.readouterr().out


@pytest.mark.parametrize(("flags", "message"), [
    ("--vision-patch-size 0", "--vision-patch-size 0 must be at least 1"),
    ("--num-attention-heads 0", "--num-attention-heads 0 must be at least 1"),
    ("--micro-batch-size 0", "--micro-batch-size 0 is below 1"),
    ("--global-batch-size 0", "--global-batch-size 0 is below 1"),
    ("--out nowhere/plan.json", "--out nowhere/plan.json: there is no folder"),
    ("--measure nowhere/costs.json", "--measure nowhere/costs.json: there is no folder"),
])
def test_a_plan_is_refused_before_it_is_made(flags: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = ["--model-provider", "llava", "--dataset-provider", "mock"]
    assert main(["plan", "--gpus", "2", *run, *flags.split()]) == 2
    assert message in capsys.readouterr().err


def test_the_plan_of_a_run_says_how_much_memory_it_takes() -> None:
    def line(flags: str) -> str:
        config = config_of(flags, "10b-even")
        return memory_line(config, validate(config, 2))

    flags = f"{PP2} --encoder-window 1"
    found = predicted_preset("10b-even", flags)
    assert line(flags) == (
        f"memory: about {found.memory_gib:.3g} GiB of tensors on the fullest rank (language stage 0 and vision), "
        f"{found.encoder_gib:.3g} GiB of them for images; on a GPU the driver and NCCL take about 5 GiB more; see mimo "
        "plan")
    assert line("--recompute selective") != line("--recompute selective --recompute-modules mlp")
    # The last stage is not the fullest with encoder windows. Long rows save more than the gradient's sum takes.
    long = """--layout homogeneous --llm-dp 2 --seq-length 32768 --max-position-embeddings 32768 --mock-min-length 16000
    --mock-max-length 16000 """
    chunked, whole = (predicted_preset("10b-even", long + more).memory_gib for more in ("--logits-chunk-size 64", ""))
    assert chunked < whole - 0.5
    assert line("--layout colocated --encoder-dp 2 --llm-cp 2").startswith("memory: about")


def test_context_parallel_ranks_share_work_and_activations() -> None:
    step, other = (step_of(config_of(f"--layout colocated --encoder-dp 4 {flags}", "10b-even"), 4)
                   for flags in ("--llm-cp 2 --llm-dp 2", "--llm-dp 4"))
    config, costs = step.config, step.costs
    whole, part = costs.language(1, 1), costs.language(1, 1, 1, 2)
    for name in ("layer_bytes", "recomputed_bytes", "ends_bytes", "ends_forward_s"):
        assert vars(part)[name] == pytest.approx(vars(whole)[name] / 2), name
    # Half of the time, and the keys and values of the other rank: 8 of 24 heads of 128 channels, in bfloat16.
    family = config.model_family
    moved = config.train.seq_length / 2 * 2 * family.query_groups * family.head_dim * 2
    exchange = moved / (costs.gpu.link_gb_s * 1e9) + LATENCY_S
    assert part.forward_s == pytest.approx(max(whole.forward_s / 2, HOST_FORWARD_S) + exchange)
    half, all_rows = (transfers(each, each.batches([SampleSize(1000, (64,))] * 24)[0])(((0, 0), "forward", 0))
                      for each in (step, other))
    assert half - LATENCY_S == pytest.approx((all_rows - LATENCY_S) / 2)
    # Weights are whole on each rank, states of the optimizer are shared by all four.
    assert step.state_bytes("language", step.layout.language, 0) == pytest.approx(
        sum(count * (2 + 4 + 12 / 4) for count, _ in step.parameters("language", step.layout.language, 0)))


def test_the_command_plans_for_the_context_parallelism_of_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    run = [*presets.PRESETS["smallest"], "--no-bf16"]
    assert main(["plan", "--gpus", "4", *run, "--llm-cp", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["layouts"]
    assert len(found) > 5 and all("--llm-cp 2" in each["flags"] for each in found)
    assert main(["plan", "--gpus", "1", *run, "--llm-cp", "2"]) == 2


@pytest.mark.parametrize("flags", [
    "--encoder-dp 4 --llm-dp 4", "--encoder-dp 4 --llm-dp 4 --encoder-window 0",
    "--encoder-dp 4 --llm-dp 4 --encoder-window 2",
    "--encoder-dp 4 --llm-dp 2 --llm-tp 2 --sequence-parallel --encoder-window 2"])
def test_lanes_of_different_rows_wait_for_each_other_at_windows_only(flags, monkeypatch):
    monkeypatch.setattr("mimo.planner.costs.LAUNCH_S", {False: (0.0, 0.0), True: (0.0, 0.0)})
    config = config_of(f"--num-layers 8 --global-batch-size 64 --layout colocated {flags}", "10b-uneven")
    step, rng = step_of(config, 4), random.Random(1)
    samples = [SampleSize(rng.choice((300, 3900)), (64,)) for _ in range(64)]
    batch = step.batches(samples)[0]
    programs = step.programs(batch)
    lanes = step.lengths(batch)
    own = [sum(step.language_s(kind, 0, length) for length in lane for kind in ("forward", "backward"))
           for lane in lanes]
    apart = sum(max(step.language_s(kind, 0, length) for length in column) for column in zip(*lanes, strict=True)
                for kind in ("forward", "backward"))
    seconds = simulate(programs, transfers(step, batch)).seconds
    assert max(own) <= seconds and step.bound_s(batch, programs) <= 1.0001 * seconds
    assert seconds < apart or "--encoder-window 2" in flags


def test_the_longest_rows_of_a_window() -> None:
    assert longest_in_windows([[1, 5, 2], [3, 1, 9]], [[0, 1], [2]]) == [1, 5, 9]


def test_the_lane_with_the_most_work_is_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mimo.planner.costs.LAUNCH_S", {False: (0.0, 0.0), True: (0.0, 0.0)})
    step = step_of(config_of("--num-layers 8 --global-batch-size 8 --layout homogeneous --llm-dp 8", "10b-uneven"), 8)
    short = [SampleSize(300, (16,))] * 7
    slow, fast = (simulate(step.programs([[[sample] for sample in [*short, last]]])).seconds
                  for last in (SampleSize(4000), short[0]))
    assert slow > 2 * fast
