"""Everything a run can get wrong before it starts, one line each."""

from __future__ import annotations

import re

import pytest

from mimo.config.cli import parse
from mimo.config.trainer import CheckpointConfig
from mimo.config.validate import (
    may_have_graphs,
    num_microbatches,
    run_world_size,
    share_with_graphs,
    steps_ahead,
    train_iterations,
    validate,
    validate_without_data,
)

FAKE = ["--model-provider", "tests.unit.config.fake_provider:model",
        "--dataset-provider", "tests.unit.config.fake_provider:dataset"]
ITERS = "--train-iters 10"
SAMPLES = "--train-samples 80"


def checked(flags: str, world_size: int = 2):
    return validate(parse([*FAKE, *flags.split()]), world_size)


@pytest.mark.parametrize("flags", [
    ITERS,
    SAMPLES,
    f"{ITERS} --lr-decay-style WSD --lr-wsd-decay-iters 3 --lr-wsd-decay-style linear --lr-warmup-iters 7",
    f"{SAMPLES} --lr-decay-style WSD --lr-wsd-decay-samples 8 --lr-warmup-samples 8",
    f"{ITERS} --lr-decay-style constant --lr-warmup-iters 9",
    f"{ITERS} --lr-decay-iters 100 --lr-warmup-iters 9",
    f"{ITERS} --min-lr 1e-3 --lr 1e-3 --clip-grad 0",
    f"{ITERS} --freeze vision,projector",
    f"{ITERS} --freeze language",
    f"{ITERS} --freeze vision --encoder-lr 1 --encoder-weight-decay 0 --correct-encoder-grad-for-partial-participation",
    f"{ITERS} --overlap-grad-reduce --overlap-param-gather --encoder-ddp-overlap --ddp-num-buckets 4",
    f"{ITERS} --overlap-grad-reduce --encoder-ddp-overlap --freeze language,vision",
    f"{ITERS} --overlap-grad-reduce --overlap-param-gather --freeze vision,projector",
    f"{ITERS} --eval-interval 5 --eval-iters 1",
    f"{ITERS} --transformer-impl local --device cpu",
    f"{ITERS} --world-size 2",
    "--dry-run",
])
def test_a_run_that_makes_sense_passes(flags):
    layout = checked(flags)
    assert layout.num_lanes == 1 and [grid.name for grid in layout.encoders] == ["vision"]


@pytest.mark.parametrize(("flags", "expected"), [
    ("", "set --train-iters or --train-samples"),
    (f"{ITERS} {SAMPLES}", "--train-iters 10 and --train-samples 80"),
    ("--train-iters 0", "--train-iters 0 is below 1"),
    ("--train-samples -1", "--train-samples -1 is below 1"),
    (f"{ITERS} --seq-length 0", "--seq-length 0 is below 1"),
    (f"{ITERS} --log-interval 0", "--log-interval 0 is below 1"),
    (f"{ITERS} --peak-tflops 0", "--peak-tflops 0.0 is not above 0"),
    (f"{ITERS} --eval-iters -1", "--eval-iters -1 is below 0"),
    (f"{ITERS} --eval-interval 5", "--eval-interval 5 with --eval-iters 0"),
    (f"{ITERS} --num-generations -1", "--num-generations -1 is below 0"),
    (f"{ITERS} --seed -1", "--seed -1 is below 0"),
    (f"{ITERS} --seed {2**64}", f"--seed {2**64} is above {2**62}"),
    (f"{ITERS} --watchdog-timeout-s 0", "--watchdog-timeout-s 0.0"),
    (f"{ITERS} --watchdog-timeout-s inf", "--watchdog-timeout-s inf is not above 0 and at most 604800"),
    (f"{ITERS} --world-size 8", "--world-size 8 is for --dry-run; this run has 2 ranks"),
    (f"{ITERS} --lr 0", "--lr 0.0 is not above 0"),
    (f"{ITERS} --lr nan", "--lr nan is not above 0"),
    (f"{ITERS} --encoder-lr -1", "--encoder-lr -1.0 is not above 0"),
    (f"{ITERS} --projector-lr 0", "--projector-lr 0.0 is not above 0"),
    (f"{ITERS} --adam-eps 0", "--adam-eps 0.0 is not above 0"),
    (f"{ITERS} --adam-beta2 1", "--adam-beta2 1.0 is not in [0, 1)"),
    (f"{ITERS} --min-lr 1 --lr 0.5", "--min-lr 1.0 is above --lr 0.5"),
    (f"{ITERS} --clip-grad -1", "--clip-grad -1.0 is below 0"),
    (f"{ITERS} --clip-grad nan", "--clip-grad nan is below 0"),
    (f"{ITERS} --weight-decay -1", "--weight-decay -1.0 is below 0"),
    (f"{ITERS} --freeze visoin,language",
     "--freeze visoin,language: unknown part visoin; known are vision, projector, language"),
    (f"{ITERS} --freeze language,vision,projector", "leaves nothing to train"),
    (f"{ITERS} --transformer-impl transformer_engine --device cpu", "--transformer-impl transformer_engine needs CUDA"),
    (f"{ITERS} --overlap-param-gather", "--overlap-param-gather needs --overlap-grad-reduce"),
    (f"{ITERS} --overlap-grad-reduce --overlap-param-gather --no-use-distributed-optimizer",
     "--overlap-param-gather needs --use-distributed-optimizer"),
    (f"{ITERS} --encoder-ddp-overlap", "--encoder-ddp-overlap needs --overlap-grad-reduce"),
    (f"{ITERS} --ddp-pad-buckets-for-high-nccl-busbw --no-use-distributed-optimizer",
     "--ddp-pad-buckets-for-high-nccl-busbw needs --use-distributed-optimizer"),
    (f"{ITERS} --overlap-grad-reduce --freeze language", "--overlap-grad-reduce with --freeze language"),
    (f"{ITERS} --overlap-grad-reduce --overlap-param-gather --encoder-ddp-overlap --freeze language",
     "--overlap-param-gather with --freeze language"),
    (f"{ITERS} --overlap-grad-reduce --encoder-ddp-overlap --freeze vision,projector",
     "a run with --freeze vision,projector would ignore --encoder-ddp-overlap: leave it out"),
    (f"{ITERS} --freeze vision,projector --correct-encoder-grad-for-partial-participation",
     "would ignore --correct-encoder-grad-for-partial-participation: leave it out"),
    (f"{ITERS} --layout colocated --encoder-dp 2 --llm-pp 2 --overlap-grad-reduce --encoder-ddp-overlap",
     "--encoder-ddp-overlap with encoder windows (--encoder-window 2)"),
    (f"{ITERS} --layout colocated --encoder-dp 2 --llm-tp 2 --encoder-window 0 "
     "--correct-encoder-grad-for-partial-participation",
     "--correct-encoder-grad-for-partial-participation with encoder windows"),
    (f"{ITERS} --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16",
     "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 needs --use-precision-aware-optimizer"),
    (f"{ITERS} --use-precision-aware-optimizer --device cpu", "--use-precision-aware-optimizer needs CUDA"),
    (f"{ITERS} --use-precision-aware-optimizer --no-bf16", "--use-precision-aware-optimizer with --no-bf16"),
    (f"{ITERS} --use-precision-aware-optimizer --no-use-distributed-optimizer",
     "--use-precision-aware-optimizer needs --use-distributed-optimizer"),
    (f"{ITERS} --use-precision-aware-optimizer --exp-avg-dtype bf16",
     "--exp-avg-dtype bf16 with --exp-avg-sq-dtype fp32: Adam would copy every moment"),
    (f"{ITERS} --use-precision-aware-optimizer --exp-avg-dtype fp8 --exp-avg-sq-dtype fp8",
     "--exp-avg-dtype fp8 is not supported: such a state has a scale for each shard"),
    (f"{ITERS} --use-precision-aware-optimizer --main-params-dtype fp16", "--main-params-dtype fp16 is not supported"),
    (f"{ITERS} --use-precision-aware-optimizer --main-params-dtype bf16",
     "--main-params-dtype bf16: Transformer Engine's Adam keeps float32 weights"),
    (f"{ITERS} --use-precision-aware-optimizer --main-grads-dtype bf16",
     "--main-grads-dtype bf16 with --grad-reduce-in-fp32: gradients are accumulated in fp32"),
    (f"{ITERS} --use-precision-aware-optimizer --no-grad-reduce-in-fp32",
     "--main-grads-dtype fp32 with --no-grad-reduce-in-fp32: gradients are accumulated in bf16"),
    (f"{ITERS} --fp8-recipe blockwise", "--fp8-recipe blockwise needs --fp8-format e4m3 or hybrid"),
    (f"{ITERS} --fp8-format hybrid --fp8-recipe delayed",
     "--fp8-recipe delayed is not supported: its scales come from a history of maxima"),
    (f"{ITERS} --encoder-fp8-format hybrid --encoder-fp8-recipe mxfp8",
     "--encoder-fp8-recipe mxfp8 needs a Blackwell GPU"),
    (f"{ITERS} --fp8-output-proj", "--fp8-output-proj needs --fp8-format e4m3 or hybrid"),
    (f"{ITERS} --fp8-format hybrid --fp8-output-proj --logits-chunk-size 8",
     "--fp8-output-proj with --logits-chunk-size 8: logits of parts of a row are computed in bfloat16"),
    (f"{ITERS} --fp8-format e4m3 --fp8-output-proj", "gradients of most logits would be rounded to zero; use hybrid"),
    (f"{ITERS} --fp8-primary-weights", "--fp8-primary-weights needs --fp8-format or --encoder-fp8-format for a part"),
    (f"{ITERS} --fp8-primary-weights --encoder-fp8-format hybrid --freeze vision", "for a part of the model that"),
    (f"{ITERS} --fp8-primary-weights --fp8-format hybrid --no-bf16",
     "--fp8-primary-weights with --no-bf16: the optimizer has no copies of float32 weights; leave out one of the two"),
    (f"{ITERS} --fp8-primary-weights --fp8-format hybrid --no-use-distributed-optimizer",
     "--fp8-primary-weights with --no-use-distributed-optimizer: the gathers of the distributed optimizer make the"),
    (f"{ITERS} --fp8-primary-weights --fp8-format hybrid --deterministic-mode --num-experts 4 --device cuda",
     "--fp8-primary-weights with --deterministic-mode: then products of experts are separate"),
    (f"{ITERS} --fp8-primary-weights --fp8-format hybrid --use-precision-aware-optimizer --device cuda",
     "--fp8-primary-weights with --use-precision-aware-optimizer: the optimizer updates the bfloat16 weights"),
    (f"{ITERS} --fp8-primary-weights --fp8-format hybrid --overlap-param-gather --overlap-grad-reduce",
     "--fp8-primary-weights with --overlap-param-gather: weights are gathered during the next pass"),
    (f"{ITERS} --fp8-primary-weights --fp8-format hybrid --moe-gemm separate --num-experts 4 --device cuda",
     "--fp8-primary-weights with --moe-gemm separate: it quantises the weights of experts in every pass"),
    (f"{ITERS} --fp8-format hybrid --moe-gemm cutlass",
     "--moe-gemm cutlass with --fp8-format hybrid: it multiplies in bfloat16 only"),
    (f"{ITERS} --layout colocated --encoder-tp 2 --fp8-format hybrid --llm-tp 2 --sequence-parallel --seq-length 40",
     "--fp8-format hybrid (tensorwise) with --sequence-parallel: --seq-length 40 * --micro-batch-size 1 over 2 ranks"
     " is not a multiple of 16 on each"),
    (f"{ITERS} --recompute-num-layers 2", "--recompute-num-layers 2 needs --recompute full, it is none"),
    (f"{ITERS} --moe-token-dispatcher-type flex", "DeepEP and HybridEP have no package that could be installed"),
    (f"{ITERS} --moe-token-dispatcher-type allgather",
     "has no experts here and would ignore --moe-token-dispatcher-type allgather: "),
    (f"{ITERS} --moe-gemm separate --no-moe-permute-fusion --moe-router-fusion --moe-per-layer-logging",
     "would ignore --moe-gemm separate, --no-moe-permute-fusion, --moe-router-fusion, --moe-per-layer-logging: "),
    (f"{ITERS} --moe-token-dispatcher-type allgather --moe-shared-expert-overlap", "only alltoall can overlap"),
    (f"{ITERS} --moe-static-rows", "--moe-static-rows with --moe-token-dispatcher-type alltoall, for which the host"),
    (f"{ITERS} --moe-static-rows --moe-token-dispatcher-type allgather --moe-gemm cutlass",
     "--moe-static-rows with --moe-gemm cutlass, for which the host waits"),
    (f"{ITERS} --moe-static-rows --moe-token-dispatcher-type allgather --no-moe-permute-fusion",
     "--moe-static-rows with --no-moe-permute-fusion: only the fused kernels"),
    (f"{ITERS} --moe-static-rows --moe-token-dispatcher-type allgather --model-provider causal_lm --num-experts 4 "
     "--llm-dp 2", "--moe-static-rows is for experts on several ranks"),
    (f"{ITERS} --moe-shared-expert-overlap --recompute selective --recompute-modules shared_experts",
     "cannot be recomputed by themselves"),
    (f"{ITERS} --recompute full --recompute-modules mlp",
     "--recompute-modules mlp needs --recompute selective, it is full"),
    (f"{ITERS} --recompute selective --recompute-modules mlp,experts",
     "--recompute-modules mlp,experts: unknown part experts; known are core_attn, mlp, moe"),
    (f"{ITERS} --recompute selective --recompute-modules gdn_norm_out", "no model has layers of a gated delta net"),
    (f"{ITERS} --recompute selective --recompute-modules mlp,mlp", "a part is named twice"),
    (f"{ITERS} --recompute selective --recompute-modules moe_act --transformer-impl local",
     "--recompute-modules moe_act with --transformer-impl local: local layers compute experts one by one"),
    (f"{ITERS} --encoder-recompute selective --encoder-recompute-modules moe",
     "--encoder-recompute-modules moe: unknown part moe; known are core_attn, mlp, layernorm"),
    (f"{ITERS} --recompute full --recompute-num-layers 99",
     "--recompute-num-layers 99: a pipeline stage has"),
    (f"{ITERS} --model-provider nemotron-moe-vlm-tiny --recompute full --recompute-num-layers 1",
     "--recompute-num-layers 1: Megatron Core recomputes all layers of a hybrid model or none"),
    (f"{ITERS} --layout colocated --encoder-dp 2 --llm-pp 2 --encoder-activation-gib 3 --freeze vision",
     "--encoder-activation-gib 3.0 with --freeze vision: a frozen encoder keeps no activations"),
    (f"{ITERS} --layout colocated --encoder-dp 2 --llm-pp 2 --encoder-activation-gib 3 --encoder-recompute full",
     "--encoder-activation-gib 3.0 with --encoder-recompute full, which already decides what is kept"),
    (f"{ITERS} --freeze vision --encoder-recompute full", "--encoder-recompute full with --freeze vision"),
    (f"{ITERS} --recompute full --recompute-num-layers 0", "--recompute-num-layers 0 is below 1"),
    (f"{ITERS} --llm-only --llm-dp 2 --encoder-recompute full", "would ignore --encoder-recompute full"),
    (f"{ITERS} --num-generations 3", "--num-generations 3 with --eval-iters 0: held-out samples are decoded"),
    (f"{ITERS} --ddp-num-buckets 2 --ddp-bucket-size 9", "--ddp-num-buckets 2 and --ddp-bucket-size 9"),
    (f"{ITERS} --ddp-num-buckets 0", "--ddp-num-buckets 0 is below 1"),
    (f"{ITERS} --seq-length 7", "--seq-length 7 is odd"),
    # Schedules that contradict themselves.
    (f"{SAMPLES} --lr-warmup-iters 2", "--lr-warmup-iters 2 with --train-samples"),
    (f"{SAMPLES} --lr-decay-iters 2", "--lr-decay-iters 2 with --train-samples"),
    (f"{SAMPLES} --lr-decay-style WSD --lr-wsd-decay-iters 2", "--lr-wsd-decay-iters 2 with --train-samples"),
    (f"{ITERS} --lr-warmup-samples 2", "--lr-warmup-samples 2 with --train-iters"),
    (f"{ITERS} --lr-decay-samples 2", "use --lr-decay-iters"),
    (f"{ITERS} --lr-wsd-decay-samples 2", "use --lr-wsd-decay-iters"),
    (f"{ITERS} --lr-warmup-iters -1", "--lr-warmup-iters -1 is below 0"),
    (f"{ITERS} --lr-decay-iters 0", "--lr-decay-iters 0 is below 1"),
    (f"{ITERS} --lr-warmup-init 1", "--lr-warmup-init 1.0 is above --lr 0.0003"),
    (f"{ITERS} --lr-warmup-iters 2 --lr-warmup-init 2e-5 --encoder-lr 1e-5",
     "--lr-warmup-init 2e-05 is above --encoder-lr 1e-05"),
    (f"{ITERS} --lr-warmup-iters 2 --lr-warmup-init 2e-5 --projector-lr 1e-5",
     "--lr-warmup-init 2e-05 is above --projector-lr 1e-05"),
    (f"{ITERS} --lr-warmup-init 1e-4", "--lr-warmup-init 0.0001 needs --lr-warmup-iters"),
    (f"{ITERS} --lr-decay-style WSD", "--lr-decay-style WSD needs --lr-wsd-decay-iters"),
    (f"{SAMPLES} --lr-decay-style WSD", "--lr-decay-style WSD needs --lr-wsd-decay-samples"),
    (f"{ITERS} --lr-wsd-decay-iters 2", "--lr-wsd-decay-iters 2 needs --lr-decay-style WSD, it is cosine"),
    (f"{ITERS} --lr-wsd-decay-style linear", "--lr-wsd-decay-style linear needs --lr-decay-style WSD"),
    (f"{ITERS} --lr-decay-style constant --lr-decay-iters 5", "--lr-decay-iters 5 with --lr-decay-style constant"),
    (f"{ITERS} --lr-decay-style constant --min-lr 1e-5", "--min-lr 1e-05 with --lr-decay-style constant"),
    (f"{ITERS} --lr-warmup-iters 10", "--lr-warmup-iters 10 is not shorter than the run, --train-iters 10"),
    (f"{SAMPLES} --lr-warmup-samples 99", "--lr-warmup-samples 99 is not shorter than the run, --train-samples 80"),
    (f"{ITERS} --lr-warmup-iters 6 --lr-decay-iters 5", "--lr-warmup-iters 6 is not shorter than --lr-decay-iters 5"),
    (f"{ITERS} --lr-decay-style WSD --lr-wsd-decay-iters 8 --lr-warmup-iters 3",
     "--lr-warmup-iters 3 + --lr-wsd-decay-iters 8 is longer than --train-iters 10"),
    (f"{ITERS} --lr-decay-style WSD --lr-wsd-decay-iters 8 --lr-decay-iters 7",
     "--lr-wsd-decay-iters 8 is longer than --lr-decay-iters 7"),
    # What only encoders have.
    (f"{ITERS} --llm-only --llm-dp 2 --encoder-lr 1", "--encoder-lr 1.0"),
    (f"{ITERS} --llm-only --llm-dp 2 --overlap-grad-reduce --encoder-ddp-overlap", "--encoder-ddp-overlap"),
    (f"{ITERS} --llm-only --llm-dp 2 --correct-encoder-grad-for-partial-participation",
     "would ignore --correct-encoder-grad-for-partial-participation"),
    (f"{ITERS} --llm-only --llm-dp 2 --load-vision-from .", "would ignore --load-vision-from .: leave it out"),
    (f"{ITERS} --llm-only --llm-dp 2 --load-hf . --load-language-from .",
     "--load-hf . with --load-language-from . in a run without an encoder leaves nothing for it to give"),
    (f"{ITERS} --llm-only --llm-dp 2 --encoder-tp 2", "--llm-only has no encoder grid: leave out --encoder-tp 2"),
    (f"{ITERS} --llm-only --llm-dp 2 --freeze projector", "unknown part projector; known are language"),
    (f"{ITERS} --llm-only --llm-dp 2 --freeze language", "leaves nothing to train"),
])
def test_a_mistake_is_named_with_its_value(flags, expected):
    with pytest.raises(ValueError) as caught:
        checked(flags)
    assert expected in str(caught.value)


A2A = "llava --num-query-groups 8 --llm-tp 4 --cp-comm-type a2a"


def validated(flags: str) -> None:
    config = parse(["--dry-run", "--dataset-provider", "mock", "--seq-length", "1024", "--global-batch-size", "64",
                    "--model-provider", *flags.split()])
    validate_without_data(config, run_world_size(config, {}))


@pytest.mark.parametrize("flags", [
    "qwen3_vl --encoder-fp8-format hybrid --layout homogeneous",
    "nemotron-moe-vlm-20l --fp8-format hybrid --llm-tp 4 --sequence-parallel",
    "llava --fp8-format hybrid --fp8-recipe blockwise --llm-tp 2",
    # Transformer Engine does not split the 576 rows of the projection that compresses keys and values.
    "deepseek_v3 --fp8-format hybrid --llm-tp 8 --sequence-parallel --transformer-impl transformer_engine",
    "llava --fp8-format hybrid --fp8-output-proj --llm-tp 2",
    f"{A2A} --llm-cp 2",
    f"{A2A} --llm-cp 4 --transformer-impl local",
    f"{A2A} --llm-cp 4 --device cpu",
])
def test_sizes_that_a_rank_can_compute_with_pass(flags):
    validated(flags)


@pytest.mark.parametrize(("flags", "expected"), [
    ("qwen2_5_vl --encoder-fp8-format hybrid", "mlp.linear_fc2.weight [1280, 3420]"),
    ("qwen3_vl --encoder-fp8-format hybrid --layout homogeneous --llm-tp 2 --sequence-parallel",
     "mlp.linear_fc2.weight [1152, 2152]"),
    ("nemotron-moe-vlm-20l --fp8-format hybrid --llm-tp 8 --sequence-parallel", "mixer.in_proj.weight [1288, 2688]"),
    ("llava --fp8-format hybrid --fp8-recipe blockwise --llm-tp 4", "mlp.linear_fc2.weight [4096, 2752]"),
    ("deepseek_v3 --fp8-format hybrid --fp8-recipe blockwise", "linear_kv_down_proj.weight [576, 7168]"),
    ("deepseek_v3 --fp8-format hybrid --llm-tp 8 --sequence-parallel --transformer-impl local",
     "linear_kv_down_proj.weight [72, 7168]"),
    ("llava --fp8-format hybrid --fp8-output-proj --make-vocab-size-divisible-by 1 --vocab-size 32072 --llm-tp 2",
     "a rank's output layer, [16036, 4096], are not multiples of 16"),
    (f"{A2A} --llm-cp 4", "the 2 key and value heads of a tensor-parallel rank (8 in all, --llm-tp 4) are not "
     "divisible by --llm-cp 4"),
])
def test_sizes_that_a_rank_cannot_compute_with_are_refused(flags, expected):
    with pytest.raises(ValueError) as caught:
        validated(flags)
    assert expected in str(caught.value)


def test_ranks_may_share_rows_and_experts():
    assert checked(f"{ITERS} --llm-cp 2 --cp-comm-type a2a", 3).language.cp == 2
    checked(f"{ITERS} --num-experts 4 --llm-dp 2 --llm-ep 2", 3)


@pytest.mark.parametrize(("dataset", "text_only"), [
    ("mock", "--mock-text-only-fraction 1"), ("digits", "--digits-text-only-fraction 1")])
def test_a_run_without_encoder_refuses_a_data_set_with_images(dataset, text_only):
    flags = f"{ITERS} --llm-only --dry-run --model-provider mock --dataset-provider {dataset}"
    with pytest.raises(ValueError) as caught:
        checked(flags, 1)
    message = str(caught.value)
    assert message.startswith(f"--llm-only: sample {dataset}/") and f"of --dataset-provider {dataset} has " in message
    assert text_only in message
    assert checked(f"{flags} {text_only}", 1).encoders == ()


def test_microbatches_and_iterations():
    config = parse([*FAKE, *"--global-batch-size 24 --micro-batch-size 3 --llm-dp 4 --train-samples 25".split()])
    assert num_microbatches(config) == 2
    assert train_iterations(config) == 2
    assert train_iterations(parse([*FAKE, *ITERS.split()])) == 10
    with pytest.raises(ValueError, match="--train-iters or --train-samples"):
        train_iterations(parse(FAKE))


def test_the_world_size_is_torchruns_and_a_dry_run_takes_what_it_needs():
    config = parse([*FAKE, "--llm-tp", "4", "--encoder-dp", "2"])
    assert run_world_size(config, {"WORLD_SIZE": "5"}) == 5
    with pytest.raises(ValueError, match="6 ranks and this is one process.*torchrun --nproc-per-node 6"):
        run_world_size(config, {})
    assert run_world_size(parse([*FAKE, "--llm-only"]), {}) == 1
    dry = parse([*FAKE, "--llm-tp", "4", "--encoder-dp", "2", "--dry-run"])
    assert run_world_size(dry, {}) == 6
    assert run_world_size(parse([*FAKE, "--dry-run", "--world-size", "264"]), {"WORLD_SIZE": "5"}) == 264


def test_a_value_of_a_file_may_need_a_flag_of_the_command_line(tmp_path):
    (tmp_path / "run.toml").write_text("train-iters = 10\nsave-interval = 5\nlr = 0\n")
    config = parse([*FAKE, "--config", str(tmp_path / "run.toml"), "--save", str(tmp_path / "to"), "--lr", "1e-3"])
    assert validate(config, 2).world_size == 2


def test_a_dry_run_says_what_the_precision_aware_optimizer_saves():
    from mimo.grid.dry_run import dry_run_report
    from mimo.registry import model_provider

    mock = ["--model-provider", "mock", "--dataset-provider", "mock"]
    for flags, expected in (((), "10 bytes a parameter instead of 12"),
                            (("--exp-avg-dtype", "bf16", "--exp-avg-sq-dtype", "bf16"), "6 bytes a parameter instead")):
        config = parse([*mock, *ITERS.split(), "--use-precision-aware-optimizer", *flags])
        report = dry_run_report(config, validate(config, 2), model_provider("mock"))
        assert f"optimizer state of language: {expected}" in report and "which saves" in report
    sizes = {}
    for frozen in ("", "vision", "projector", "vision,projector"):
        config = parse([*mock, *ITERS.split(), "--use-precision-aware-optimizer", "--freeze", frozen])
        report = dry_run_report(config, validate(config, 2), model_provider("mock"))
        state = [line for line in report.splitlines() if line.startswith("optimizer state of vision")]
        sizes[frozen] = state[0].split(", ")[1] if state else None
    assert sizes["vision,projector"] is None and len(set(sizes.values())) == 4
    config = parse([*mock, *ITERS.split()])
    assert "optimizer state" not in dry_run_report(config, validate(config, 2), model_provider("mock"))


@pytest.mark.parametrize(("flags", "ranks", "named"), [
    ("--recompute selective --recompute-modules layernorm,core_attn", 1, "--recompute-modules layernorm,core_attn"),
    ("--fp8-format e4m3 --recompute full", 1, "--fp8-format e4m3 and --recompute full"),
    ("--fp8-format e4m3 --fp8-primary-weights", 1, "--fp8-primary-weights"),
    ("--hidden-dropout 0.1", 1, "--hidden-dropout 0.1"),
    ("--attention-dropout 0.1", 1, "--attention-dropout 0.1"),
    ("--model-provider deepseek_v3", 1, "--model-provider deepseek_v3"),
    ("--num-experts 4 --moe-gemm cutlass", 1, "--moe-gemm cutlass"),
    ("--num-experts 4 --moe-token-dispatcher-type allgather", 1, "--moe-token-dispatcher-type allgather"),
    ("--llm-cp 2", 2, "--llm-cp 2"),
    ("--num-experts 4 --llm-dp 2 --llm-ep 2 --recompute full", 2, "--llm-ep 2, --llm-expt-tp 1 and --recompute full"),
    ("--num-experts 4 --moe-shared-expert-overlap", 1, "--moe-shared-expert-overlap"),
    ("--num-experts 4 --llm-dp 2 --moe-router-load-balancing-type global_aux_loss", 2,
     "--moe-router-load-balancing-type global_aux_loss and --llm-dp 2"),
    ("--overlap-grad-reduce --overlap-param-gather --global-batch-size 2", 1,
     "--overlap-param-gather and --overlap-grad-reduce and --global-batch-size 2"),
    ("--overlap-grad-reduce --global-batch-size 1 --micro-batch-size 1", 1,
     "--overlap-grad-reduce and --global-batch-size 1"),
])
def test_graphs_of_what_they_cannot_contain_are_refused(flags: str, ranks: int, named: str) -> None:
    given = ["--model-provider", "causal_lm", "--dataset-provider", "mock", "--train-iters", "1", "--global-batch-size",
             "4", "--micro-batch-size", "1", *flags.split()]
    validate(parse(given), ranks)
    with pytest.raises(ValueError, match=re.escape(f"--cuda-graphs with {named}: ")):
        validate(parse([*given, "--cuda-graphs"]), ranks)


@pytest.mark.parametrize("flags", [
    "--llm-ep 2 --moe-gemm separate", "--llm-ep 2 --moe-token-dispatcher-type allgather", "--llm-expt-tp 2",
    "--llm-ep 2 --moe-token-dispatcher-type allgather --moe-static-rows --recompute full",
    "--llm-ep 2 --recompute selective --recompute-modules core_attn,moe --no-bf16"])
def test_graphs_do_not_contain_the_experts_of_ranks_that_exchange_tokens(flags: str) -> None:
    config = parse(["--model-provider", "causal_lm", "--dataset-provider", "mock", "--train-iters", "1",
                    "--global-batch-size", "4", "--micro-batch-size", "1", "--num-experts", "4", "--llm-dp", "2",
                    "--cuda-graphs", *flags.split()])
    validate(config, 2)
    assert may_have_graphs(config) and share_with_graphs(config) == ("--llm-expt-tp" not in flags)


# Two microbatches an iteration.
FROZEN = f"{ITERS} --freeze vision --global-batch-size 2 --encoder-prefetch-depth"
AHEAD = f"{ITERS} --encoder-run-ahead"


@pytest.mark.parametrize(("flags", "world_size"), [
    (f"{FROZEN} 0", 2), (f"{FROZEN} 1", 2), (f"{FROZEN} 8", 2), (f"{FROZEN} 3 --encoder-tp 2 --llm-pp 2", 4),
    (f"{FROZEN} 3 --freeze vision,projector", 2), (f"{FROZEN} 3 --freeze language,vision", 2),
    (f"{ITERS} --layout colocated --encoder-prefetch-depth 0", 1),
    # A trained encoder may be ahead inside an iteration.
    (f"{AHEAD} 3", 2), (f"{AHEAD} 100 --encoder-tp 2 --llm-pp 2", 4), (f"{AHEAD} 1 --encoder-pp 2", 3),
    (f"{AHEAD} 1 --freeze vision,projector", 2), (f"{AHEAD} 0 --layout colocated", 1),
])
def test_an_encoder_may_prefetch_or_run_ahead(flags, world_size):
    assert checked(flags, world_size).encoders


@pytest.mark.parametrize(("flags", "world_size", "expected"), [
    (f"{FROZEN} -1", 2, "--encoder-prefetch-depth -1 is below 0"),
    (f"{ITERS} --encoder-prefetch-depth 2", 2,
     "--encoder-prefetch-depth 2 with --freeze '': vision trains, .* add vision to"),
    (f"{ITERS} --freeze projector --encoder-prefetch-depth 2", 2, "with --freeze 'projector': vision trains"),
    (f"{FROZEN} 1 --layout colocated", 1, "--encoder-prefetch-depth 1 with --layout colocated: .* --layout disjoint"),
    (f"{FROZEN} 1 --llm-only --freeze x", 1, "--freeze x: unknown part"),
    (f"{ITERS} --llm-only --encoder-prefetch-depth 1", 1, "--encoder-prefetch-depth 1: a run without encoder"),
    (f"{FROZEN} 1 --encoder-pp 2", 3, "--encoder-prefetch-depth 1 with --encoder-pp 2: .* use --encoder-pp 1"),
    (f"{FROZEN} 9", 2, "--encoder-prefetch-depth 9: an iteration has 2 microbatches .*; at most 8"),
    (f"{AHEAD} -1", 2, "--encoder-run-ahead -1 is below 0"),
    (f"{AHEAD} 2 --layout colocated", 1, "--encoder-run-ahead 2 with --layout colocated: .* leave it out"),
    (f"{AHEAD} 2 --layout homogeneous", 1, "--encoder-run-ahead 2 with --layout homogeneous: .*disjoint"),
    (f"{AHEAD} 2 --llm-only", 1, "--encoder-run-ahead 2: a run without encoder"),
    (f"{FROZEN} 1 --encoder-run-ahead 2", 2, "--encoder-run-ahead 2 with --encoder-prefetch-depth 1: a frozen encoder"),
    (f"{ITERS} --llm-tp 4 --sequence-parallel --seq-length 50", 5,
     "--seq-length 50 is not divisible by --llm-tp 4.*nearest are 48 and 52"),
    (f"{ITERS} --cp-comm-type a2a", 2, "--cp-comm-type a2a needs --llm-cp above 1; leave it out"),
    (f"{ITERS} --llm-dp 2 --llm-ep 2", 3, "--llm-ep 2 .*splits experts, but the model has none"),
    (f"{ITERS} --num-experts 4 --llm-tp 2", 3, "--num-experts 4 with --llm-tp 2 needs --sequence-parallel"),
])
def test_flags_that_do_not_go_together_are_refused_by_name_and_value(flags, world_size, expected):
    with pytest.raises(ValueError, match=expected):
        checked(flags, world_size)


@pytest.mark.parametrize(("depth", "num_microbatches", "steps"), [(0, 4, 0), (1, 1, 1), (1, 4, 1), (4, 4, 1), (5, 4, 2),
                                                                 (3, 1, 3)])
def test_a_queue_reaches_over_as_many_iterations_as_it_is_long(depth, num_microbatches, steps):
    assert steps_ahead(depth, num_microbatches) == steps


@pytest.mark.parametrize(("load", "save", "elsewhere"), [
    ("a", "b", True), ("a", "a/b", True), ("a/b", "a", True), ("a/iter_0000010", "b", True),
    ("a", "./c/../a/", False), ("link", "a", False), ("link/iter_0000010", "a", False), ("a/release", "a", False),
    (None, "a", False), ("a", None, False), (None, None, False),
])
def test_a_run_starts_elsewhere_than_where_it_saves(tmp_path, monkeypatch, load, save, elsewhere):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to("a")
    assert CheckpointConfig(load=load, save=save).starts_elsewhere == elsewhere


@pytest.mark.parametrize("load", ["a", "a/iter_0000010"])
def test_fine_tuning_does_not_replace_what_it_began_with(load: str) -> None:
    flags = ["--finetune", "--load", load]
    validate(parse([*FAKE, *ITERS.split(), *flags, "--save", "b"]), 2)
    validate(parse([*FAKE, *ITERS.split(), *flags]), 2)
    with pytest.raises(ValueError, match=f"--finetune with --load {load} and --save a: .*give --save another folder"):
        validate(parse([*FAKE, *ITERS.split(), *flags, "--save", "a"]), 2)


@pytest.mark.parametrize("key", ["seq-length", "seq_length"])
def test_an_allowed_difference_is_the_name_of_a_flag(key: str) -> None:
    config = parse([*FAKE, *ITERS.split(), "--allow-difference", key, "--allow-difference", "seed"])
    validate(config, 2)
    assert config.checkpoint.allowed_differences == {"seq_length", "seed"}
    with pytest.raises(ValueError, match=r"--allow-difference sequence-length: the run has no flag --sequence-length; "
                                         r".*did you mean seq-length or"):
        validate(parse([*FAKE, *ITERS.split(), "--allow-difference", "sequence-length"]), 2)
