"""`train_rl.py` of a vision-language model: encoder and language model on grids of their own, a live engine, images."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.support.launch import records, torchrun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

FLAGS = """--device cpu --no-bf16 --transformer-impl local --model-provider llava --vision-image-size 8
--vision-patch-size 4 --vision-hidden-size 64 --vision-num-layers 2 --vision-num-attention-heads 2
--vision-ffn-hidden-size 96 --num-layers 2 --hidden-size 64 --num-attention-heads 2 --num-query-groups 1
--ffn-hidden-size 96 --vocab-size 32 --make-vocab-size-divisible-by 32 --image-token-id 3 --rotary-base 100
--max-position-embeddings 64 --dataset-provider digits --reward tests.support.rl_rewards:digits --seq-length 32
--max-completion-tokens 5 --max-tokens-per-microbatch 96 --global-batch-size 32 --completions-per-prompt 8
--eval-prompts 8 --train-iters 3 --lr 1e-2 --lr-decay-style constant --watchdog-timeout-s 60""".split()
# Images of any size: two digits side by side are two tokens.
QWEN = [*FLAGS[:FLAGS.index("--model-provider")], *"""--model-provider qwen2_5_vl --mrope-section 4 6 6
--vision-patch-size 4 --vision-hidden-size 64 --vision-num-layers 2 --vision-num-attention-heads 2
--vision-ffn-hidden-size 96 --vision-window-size 8 --vision-full-attention-layers 1 --video-token-id 31
--vision-start-token-id 30 --vision-end-token-id 29 --digits-image-size 8 --digits-strip""".split(),
        *FLAGS[FLAGS.index("--num-layers"):]]
# ranks, flags
LAYOUTS = {
    "fan-out": (3, "--llm-dp 2"),
    "fan-in-siglip": (3, "--encoder-dp 2 --no-vision-class-token --no-vision-pre-layernorm --vision-patch-bias "
                         "--vision-hidden-act gelu_tanh"),
    "colocated": (1, "--layout colocated"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_three_steps_train_on_completions_of_prompts_with_images(tmp_path: Path, layout: str) -> None:
    num_processes, flags = LAYOUTS[layout]
    check_three_steps(tmp_path, num_processes, [*FLAGS, *flags.split()])


@pytest.mark.parametrize("layout", ["fan-out", "colocated"])
def test_three_steps_of_a_qwen_vl(tmp_path: Path, layout: str) -> None:
    num_processes, flags = LAYOUTS[layout]
    check_three_steps(tmp_path, num_processes, [*QWEN, *flags.split()])


def check_three_steps(tmp_path: Path, num_processes: int, flags: list[str]) -> None:
    done = torchrun(num_processes, *flags, "--refit-verify-interval", "1", "--run-dir", str(tmp_path),
                    script="train_rl.py")
    assert done.returncode == 0, done.stdout[-3000:]
    steps = [record for record in records(tmp_path) if "gen-kl" in record]
    assert [step["iteration"] for step in steps] == [1, 2, 3]
    for step in steps:
        assert step["success"] and math.isfinite(step["loss"]) and step["grad-norm"] > 0
        # Around 1e-14. Pixels of another deviation, by a fiftieth, make it 3e-9 in a model that has learned nothing.
        assert 0 <= step["gen-kl"] < 1e-10 and step["max-abs-dlogp"] < 1e-4
    assert done.stdout.strip().splitlines()[-1].startswith("reward: ")


def test_prompts_without_images_train_a_model_with_an_encoder(tmp_path: Path) -> None:
    done = torchrun(2, *FLAGS, "--dataset-provider", "arithmetic", "--vocab-size", "104", "--image-token-id", "103",
                    "--run-dir", str(tmp_path), script="train_rl.py")
    assert done.returncode == 0, done.stdout[-3000:]
    steps = [record for record in records(tmp_path) if "gen-kl" in record]
    assert len(steps) == 3 and all(step["success"] and 0 <= step["gen-kl"] < 1e-5 for step in steps)
