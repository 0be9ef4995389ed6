"""`train_rl.py` on GPUs, in bfloat16, with a live engine: on the trainer's own GPU, and on one beside it."""

from __future__ import annotations

import math
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.support.launch import records, torchrun, torchrun_on_two_hosts

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU"),
              pytest.mark.timeout(580)]

FLAGS = """--device cuda --bf16 --transformer-impl local --model-provider causal_lm --num-layers 2 --hidden-size 256
--num-attention-heads 4 --num-query-groups 2 --kv-channels 64 --ffn-hidden-size 256 --vocab-size 100 --num-experts 4
--moe-router-topk 2 --moe-ffn-hidden-size 128 --qk-layernorm --seq-length 32 --max-completion-tokens 12
--max-tokens-per-microbatch 256 --global-batch-size 32 --completions-per-prompt 8 --train-iters 3 --lr 1e-4
--lr-decay-style constant --watchdog-timeout-s 120 --engine-memory 0.3 --engine-enforce-eager
--refit-verify-interval 1 --eval-prompts 4 --reward tests.support.rl_rewards:digits""".split()

# Prompts with one to four images.
IMAGES = """--layout colocated --dataset-provider digits --digits-image-size 32 --vocab-size 128 --image-token-id 127
--vision-patch-size 8 --vision-hidden-size 128 --vision-num-attention-heads 2"""
MODELS = {
    "qwen3_vl": """--mrope-section 12 10 10 --vision-num-layers 2 --vision-ffn-hidden-size 256
        --vision-num-position-embeddings 16 --vision-deepstack-layers 0 1 --video-token-id 126
        --vision-start-token-id 125 --vision-end-token-id 124""",
    "nemotron-moe-vlm-tiny": "--hybrid-layer-pattern ME*- --vision-max-image-size 128",
}


# With FP8, the engine has to leave the encoder and the projector in bfloat16, as they are here.
@pytest.mark.parametrize(("model", "quantization"), [*((model, "none") for model in MODELS),
                                                     ("qwen3_vl", "fp8_per_block")])
def test_three_steps_on_prompts_with_images(model: str, quantization: str, tmp_path: Path) -> None:
    flags = [*FLAGS, *IMAGES.split(), "--model-provider", model, *MODELS[model].split(), "--seq-length", "64",
             "--engine-quantization", quantization]
    # The layers of the one come from a pattern, and the other one is dense.
    for name in ("--num-experts", "--moe-router-topk", "--moe-ffn-hidden-size") if model == "qwen3_vl" else (
            "--num-layers",):
        at = flags.index(name)
        del flags[at:at + 2]
    if model != "qwen3_vl":
        flags.remove("--qk-layernorm")
    done = torchrun(1, *flags, "--engine-placement", "colocated", "--run-dir", str(tmp_path), script="train_rl.py",
                    timeout_s=500)
    assert done.returncode == 0, done.stdout[-5000:]
    steps = [each for each in records(tmp_path) if "loss" in each]
    print([step["gen-kl"] for step in steps])
    assert len(steps) == 3 and all(step["success"] and 0 <= step["gen-kl"] < 2e-2 for step in steps)


@pytest.mark.skipif(find_spec("transformer_engine") is None, reason="needs Transformer Engine")
def test_fp8_policy_and_fp8_engine(tmp_path: Path) -> None:
    """Heads and widths are whole blocks, so both sides multiply by the same numbers."""
    flags = [*FLAGS, "--transformer-impl", "transformer_engine", "--kv-channels", "128", "--fp8-format", "e4m3",
             "--fp8-recipe", "blockwise", "--engine-quantization", "fp8_per_block", "--engine-placement", "colocated"]
    done = torchrun(1, *flags, "--run-dir", str(tmp_path), script="train_rl.py", timeout_s=500)
    assert done.returncode == 0, done.stdout[-5000:]
    assert "multiply in FP8" in done.stdout
    steps = [each for each in records(tmp_path) if "loss" in each]
    print([step["gen-kl"] for step in steps])
    assert len(steps) == 3 and all(step["success"] and 0 <= step["gen-kl"] < 2e-2 for step in steps)


@pytest.mark.parametrize("quantization", ["none", "fp8_per_block"])
def test_an_fp8_cache_whose_scales_come_with_each_refit(quantization: str, tmp_path: Path) -> None:
    """The engine replays CUDA graphs, which have to see the scales change."""
    done = torchrun(1, *FLAGS, "--engine-kv-cache-dtype", "fp8", "--engine-kv-scales", "calibrated",
                    "--engine-quantization", quantization, "--engine-placement", "colocated",
                    "--no-engine-enforce-eager", "--run-dir", str(tmp_path), script="train_rl.py", timeout_s=500,
                    TORCHDYNAMO_DISABLE="0")  # vLLM captures what it has compiled
    assert done.returncode == 0, done.stdout[-5000:]
    steps = [each for each in records(tmp_path) if "loss" in each]
    print([(step["gen-kl"], step["largest-kv-scale"]) for step in steps])
    assert len(steps) == 3 and all(step["success"] and 0 <= step["gen-kl"] < 2e-2 for step in steps)


@pytest.mark.parametrize("placement", ["colocated", "separate", "ray", "one-step-off"])
def test_three_steps_on_completions_of_the_weights_as_they_are(placement: str, tmp_path: Path) -> None:
    if placement != "colocated" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    mode = ["--rollout-mode", "one-step-off"] if placement == "one-step-off" else ["--engine-placement", placement]
    done = torchrun(1, *FLAGS, *mode, "--run-dir", str(tmp_path), script="train_rl.py", timeout_s=400)
    assert done.returncode == 0, done.stdout[-5000:]
    steps = [each for each in records(tmp_path) if "loss" in each]
    assert [step["iteration"] for step in steps] == [1, 2, 3]
    for step in steps:
        assert step["success"] and math.isfinite(step["loss"]) and step["grad-norm"] > 0
        # bfloat16 on other kernels; stale weights of a model of such random weights are far from each other.
        assert 0 <= step["gen-kl"] < 2e-2 and step["refit-bytes"] > 100_000
    assert (steps[1]["memory-s"] > 0) == (placement == "colocated")


@pytest.mark.skipif(torch.cuda.device_count() < 2 or find_spec("ray") is None, reason="needs two GPUs and Ray")
@pytest.mark.parametrize("engine", ["--engine-dp 2", "--engine-tp 2 --engine-nodes 2"])
def test_engines_take_turns_with_the_trainer_on_two_hosts(engine: str, tmp_path: Path) -> None:
    done = torchrun_on_two_hosts(*FLAGS, "--llm-dp", "2", "--llm-ep", "2", "--engine-placement", "colocated",
                                 *engine.split(), run_dir=tmp_path, timeout_s=500, gpus=("0", "1"))
    assert [each.returncode for each in done] == [0, 0], done[0].stdout[-5000:] + done[1].stdout[-2000:]
    steps = [each for each in records(tmp_path) if "loss" in each]
    print([(step["gen-kl"], step["memory-s"]) for step in steps])
    assert len(steps) == 3 and all(step["success"] and 0 <= step["gen-kl"] < 2e-2 for step in steps)
    assert steps[1]["memory-s"] > 0
