"""Plans of models with parts that are frozen, copied or split in another way, and of models from a config.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mimo.config.cli import parse, to_toml
from mimo.config.trainer import RunConfig
from mimo.config.validate import layers_of_stages, validate
from mimo.grid.spec import Layout
from mimo.observability.flops import SequenceSums
from mimo.planner.candidates import Search
from mimo.planner.costs import Costs
from mimo.planner.predict import Step
from mimo.planner.workload import SampleSize
from mimo.training.step_metrics import FlopsMeter
from providers import causal_lm
from tests.support.planning import H200, config_of, searched, step_of

LLAVA = "--model-provider llava --dataset-provider mock --layout homogeneous"
SMALL = """--model-provider causal_lm --dataset-provider mock --mock-text-only-fraction 1 --num-layers 4
--hidden-size 512 --num-attention-heads 8 --ffn-hidden-size 1024 --vocab-size 32000 --global-batch-size 8
--seq-length 1024"""
MTP = """--model-provider nemotron_h --dataset-provider mock --mock-text-only-fraction 1 --global-batch-size 8
--seq-length 4096"""


def states(step: Step, stage: int = 0, module: str = "language") -> float:
    return step.state_bytes(module, step.layout.grids[module], stage)


@pytest.mark.parametrize(("freeze", "vision", "projector"), [
    ("", True, True), ("--freeze vision", False, True), ("--freeze projector", True, False),
    ("--freeze vision,projector", False, False)])
def test_a_projector_trains_without_its_encoder_and_the_reverse(freeze: str, vision: bool, projector: bool) -> None:
    step = step_of(config_of(f"{LLAVA} --llm-dp 2 {freeze}"), 2)
    shapes = {True: 0.0, False: 0.0}
    for shape in step.costs.shapes["vision"]:
        size = shape.count
        for axis in shape.shape:
            size *= axis
        shapes[shape.name.startswith("projector.")] += size
    expected = 2 * sum(shapes.values()) + (4 + 12 / 2) * (vision * shapes[False] + projector * shapes[True])
    assert states(step, module="vision") == pytest.approx(expected)


def test_a_projector_that_trains_alone_is_reduced_and_updated() -> None:
    step = step_of(config_of(f"{LLAVA} --llm-dp 2 --freeze vision,language"), 2)
    assert step.optimizer_s() > 0 and step.reduction_s() > 0
    assert not step.costs.trained("language")
    assert {shape.name.split(".")[0] for shape in step.costs.trained("vision")} == {"projector"}


@pytest.mark.parametrize("flags", [SMALL, MTP, "--model-provider deepseek_v3 --dataset-provider mock --num-layers 4"])
def test_the_last_stage_has_a_copy_of_a_tied_embedding(flags: str) -> None:
    tied = f"{flags} --no-untie-embeddings-and-output-weights"
    last = {more: states(step_of(config_of(f"{more} --llm-pp 2"), 2), 1) for more in (flags, tied)}
    first = {more: states(step_of(config_of(f"{more} --llm-pp 2"), 2), 0) for more in (flags, tied)}
    assert last[flags] == last[tied] and first[flags] == first[tied]
    # One stage has the embedding once.
    whole, shared = (states(step_of(config_of(more), 1)) for more in (flags, tied))
    family = config_of(flags).model_family
    assert whole - shared == 18 * family.padded_vocab_size() * family.hidden_size


def test_multi_token_prediction_has_an_embedding_logits_and_activations_of_its_own() -> None:
    pattern = "--hybrid-layer-pattern M*M*"
    plain, one, two = (step_of(config_of(f"{MTP} {pattern}{more} --llm-pp 2"), 2) for more in ("", "/*-", "/*-/*-"))
    family = one.config.model_family
    embedding = family.padded_vocab_size() * family.hidden_size
    layers = sum(shape.count * shape.shape[0] * (shape.shape[1] if len(shape.shape) > 1 else 1)
                 for shape in one.costs.shapes["language"] if shape.name.startswith("mtp."))
    assert states(one, 1) - states(plain, 1) == 18 * (embedding + layers)
    assert states(one, 0) == states(plain, 0)
    logits = 4096 * family.padded_vocab_size() * 4
    assert [each.pass_cost.ends_bytes for each in (plain, one, two)] == [logits, 2 * logits, 3 * logits]
    kept = [each.pass_cost.mtp_bytes for each in (plain, one, two)]
    assert kept[0] == 0 and kept[2] == 2 * kept[1] > 0
    # Two layers of attention and MLP of the decoder keep as much, besides what the projection keeps.
    decoder = step_of(config_of(f"{MTP} --hybrid-layer-pattern *-"), 1).pass_cost.layer_bytes * 2
    assert kept[1] == pytest.approx(decoder + 4096 * 2 * family.hidden_size * 2)
    memory = [each.memory(each.batches([SampleSize(4096)] * 8))[0] for each in (plain, one)]
    assert memory[1] > memory[0]


def test_multi_token_prediction_takes_time_on_the_last_stage_only() -> None:
    pattern = "--hybrid-layer-pattern M*M*"
    plain, one, two = (step_of(config_of(f"{MTP} {pattern}{more} --llm-pp 2"), 2) for more in ("", "/*-", "/*-/*-"))

    def seconds(step: Step, kind: str, stage: int) -> float:
        return step.language_s(kind, stage, 4096)

    for kind in ("forward", "backward"):
        assert seconds(one, kind, 0) == seconds(plain, kind, 0)
        depths = [seconds(step, kind, 1) - seconds(plain, kind, 1) for step in (one, two)]
        assert depths[1] == pytest.approx(2 * depths[0]) and depths[0] > 0
        assert one.launch_s(kind, 0, 4096) == plain.launch_s(kind, 0, 4096)
        # Two layers of attention and MLP each, beside two layers of the stage.
        assert one.launch_s(kind, 1, 4096) == pytest.approx(2 * plain.launch_s(kind, 1, 4096))
    # They take as long as in the decoder.
    decoder = step_of(config_of(f"{MTP} --hybrid-layer-pattern *-"), 1).pass_cost
    assert one.pass_cost.mtp_forward_s == pytest.approx(2 * decoder.forward_s)
    again = step_of(config_of(f"{MTP} {pattern}/*- --llm-pp 2 --recompute full"), 2)
    for stage, further in enumerate((0.0, one.pass_cost.mtp_forward_s)):
        repeated = seconds(again, "backward", stage) - seconds(one, "backward", stage)
        assert repeated == pytest.approx(2 * one.pass_cost.forward_s + further)


def test_no_graph_contains_multi_token_prediction() -> None:
    plain, graphs = (step_of(config_of(f"{MTP} --hybrid-layer-pattern M*M*/*- {more}"), 1).language_cost(512)
                     for more in ("", "--cuda-graphs"))
    assert graphs.launch_s == (0.0, 0.0) and graphs.mtp_launch_s == plain.mtp_launch_s > (0.0, 0.0)
    assert graphs.mtp_forward_s == plain.mtp_forward_s


def test_multi_token_prediction_keeps_fp8_copies_of_its_matrices() -> None:
    pattern = "--hybrid-layer-pattern M*M*/*- --llm-pp 2"
    plain, quantised = (step_of(config_of(f"{MTP} {pattern}{more}"), 2) for more in ("", " --fp8-format hybrid"))
    copied = sum(shape.count * shape.shape[0] * shape.shape[1] for shape in plain.costs.shapes["language"]
                 if shape.name.startswith("mtp.") and len(shape.shape) == 2)
    assert copied
    # Both stages have as many layers of the decoder, and only the last one has multi-token prediction.
    first, last = (states(quantised, stage) - states(plain, stage) for stage in (0, 1))
    assert last - first == 2 * copied


def test_only_sequence_parallelism_divides_norms_and_residuals() -> None:
    one, rows, whole = (step_of(config_of(f"{SMALL} {flags}"), gpus).pass_cost for flags, gpus in (
        ("", 1), ("--llm-tp 2 --sequence-parallel", 2), ("--llm-tp 2", 2)))
    assert rows.layer_bytes == pytest.approx(one.layer_bytes / 2)
    assert rows.recomputed_bytes == pytest.approx(one.recomputed_bytes / 2)
    # For each token, norms and residuals keep four times the width, in two bytes each.
    assert whole.layer_bytes - rows.layer_bytes == pytest.approx(1024 * 4 * 512 * 2 / 2)
    assert whole.recomputed_bytes == one.recomputed_bytes and whole.ends_bytes == rows.ends_bytes


def test_activations_in_float32_need_twice_the_memory() -> None:
    half, whole = (step_of(config_of(f"{LLAVA} {more}"), 1) for more in ("", "--no-bf16"))
    for name in ("layer_bytes", "recomputed_bytes", "ends_bytes"):
        assert vars(whole.pass_cost)[name] == 2 * vars(half.pass_cost)[name] > 0, name
    for name in ("layer_bytes", "recomputed_bytes"):
        encoders = [vars(step.costs.encoder("vision", 1))[name] for step in (half, whole)]
        assert encoders[1] == 2 * encoders[0] > 0, name


EXPERTS = SMALL.replace("--num-layers 4", "--num-layers 6 --num-experts 16 --moe-router-topk 8 --moe-ffn-hidden-size "
                        "256 --qk-layernorm --moe-aux-loss-coeff 0.001")


def test_sizes_of_a_config_json_are_those_of_the_plan(tmp_path: Path) -> None:
    given = config_of(EXPERTS)
    (tmp_path / "config.json").write_text(json.dumps(causal_lm.provider.hf_config(given.model_family)))
    file = config_of(f"""--model-provider causal_lm --dataset-provider mock --mock-text-only-fraction 1
        --global-batch-size 8 --seq-length 1024 --hf-config {tmp_path}""")
    first, second = Costs(given, H200), Costs(file, H200)
    assert (second.num_layers, second.top_k) == (first.num_layers, first.top_k) == (6, 8)
    assert second.language(1, 1) == first.language(1, 1)
    layout = validate(file, 1)
    assert layers_of_stages(file, layout) == (6,)
    found = searched(file, 2, [SampleSize(1024)] * 8)
    cuts = {each.config.layout.llm_pp_layout for each in found if each.config.layout.llm_pp == 2}
    assert cuts > {None} and all(sum(map(int, cut.split(","))) == 6 for cut in cuts if cut)


def test_a_share_of_recomputed_layers_is_one_of_the_layers_of_a_config_json(tmp_path: Path) -> None:
    given = config_of(f"{SMALL} --recompute full --recompute-num-layers 2")
    (tmp_path / "config.json").write_text(json.dumps(causal_lm.provider.hf_config(given.model_family)))
    file = config_of(f"""--model-provider causal_lm --dataset-provider mock --mock-text-only-fraction 1
        --seq-length 1024 --hf-config {tmp_path} --recompute full --recompute-num-layers 2""")
    rows = {"language": SequenceSums.of_rows([[1024]], 1024)}

    def computed(config: RunConfig) -> dict[str, float]:
        layout: Layout = validate(config, 1)
        meter = FlopsMeter.of(config, causal_lm.provider, layout, impl="transformer_engine", device_name="cpu")
        assert meter is not None
        return meter.counter.hardware_flops(rows)

    assert computed(file) == computed(given)
    with pytest.raises(ValueError, match="--recompute-num-layers 5: a pipeline stage has 4 layers at most"):
        validate(config_of(f"""--model-provider causal_lm --dataset-provider mock --seq-length 1024 --llm-only
            --hf-config {tmp_path} --recompute full --recompute-num-layers 5"""), 1)


def test_flags_of_a_plan_undo_the_layout_of_a_file(tmp_path: Path) -> None:
    base = config_of("--no-bf16 --encoder-tp 2 --llm-pp 2 --encoder-run-ahead 1 --llm-offset 2", "smallest")
    (tmp_path / "run.toml").write_text(to_toml(base))
    found = searched(base, 4, [SampleSize(100, (4,))] * 16)
    assert {each.kind for each in found} == {"homogeneous", "colocated", "disjoint"}
    for each in found:
        again = parse(["--config", str(tmp_path / "run.toml"), *each.flags.split()])
        assert again.layout == each.config.layout, each.flags
        validate(again, 4)
    assert Search(base, Costs(base, H200), [SampleSize(100, (4,))], 4).candidate(
        "yours", base, validate(base, 4)).flags == "--encoder-tp 2 --encoder-run-ahead 1 --llm-offset 2 --llm-pp 2"
