"""FLOPs that the trainer says against those that torch counts in the passes of a step, for real models of every family.

Torch sees what the layers in plain PyTorch compute: padding, whole score matrices, recomputation, and no convolution of
Mamba layers, which multiplies element by element. That is `FlopsCounter.hardware_flops` without convolutions. Rows are
two chunks of the scan: of a single one torch's autograd leaves out the gradients of states that nobody reads.
"""

from __future__ import annotations

import pytest

from mimo.protocols import LANGUAGE
from tests.support import flops
from tests.support.equality import BASE, MODEL, MOE
from tests.support.marks import fast_only
from tests.support.spawn import WorkerPool

COMMON = (*BASE, "--seq-length", "256", "--global-batch-size", "3")
ONE = ("--layout", "colocated")
LLAVA = (*COMMON, *MODEL, *ONE)
NEMOTRON = (*COMMON, *ONE, *"--model-provider nemotron-moe-vlm-tiny --mock-image-size 32 --image-token-id 95".split())
TEXT = """--dataset-provider mock --device cpu --no-bf16 --transformer-impl local --seq-length 256
--global-batch-size 3 --micro-batch-size 1 --train-iters 1 --mock-min-length 5 --mock-max-length 200
--num-generations 0 --watchdog-timeout-s 60""".split()
QWEN3_MOE = (*TEXT, *"""--model-provider causal_lm --num-layers 2 --hidden-size 32
--num-attention-heads 4 --num-query-groups 2 --kv-channels 16 --qk-layernorm --vocab-size 99 --num-experts 4
--moe-router-topk 2 --moe-ffn-hidden-size 24""".split())
DEEPSEEK = (*TEXT, *"""--model-provider deepseek_v3 --num-layers 3 --hidden-size 32 --num-attention-heads 4
--ffn-hidden-size 48 --vocab-size 90 --q-lora-rank 12 --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 4
--v-head-dim 6 --num-experts 8 --moe-router-topk 4 --moe-router-num-groups 4 --moe-router-group-topk 2
--moe-ffn-hidden-size 20 --moe-shared-expert-intermediate-size 40 --first-k-dense-replace 1""".split())
QWEN3_VL = (*COMMON, *ONE, *"""--model-provider qwen3_vl --mrope-section 4 2 2 --num-query-groups 2 --kv-channels 16
--vision-patch-size 4 --vision-hidden-size 16 --vision-num-layers 4 --vision-num-attention-heads 2
--vision-ffn-hidden-size 20 --vision-num-position-embeddings 25 --vision-deepstack-layers 0 2 --image-token-id 95
--hidden-size 32 --num-attention-heads 4 --num-layers 2 --ffn-hidden-size 48 --vocab-size 96 --mock-image-size 16
--mock-image-size-cv 0.6""".split())
# Images of whole windows: the others count as whole ones.
QWEN25_VL = (*COMMON, *ONE, *"""--model-provider qwen2_5_vl --mrope-section 1 2 1 --num-query-groups 2
--vision-patch-size 4 --vision-hidden-size 16 --vision-num-layers 4 --vision-num-attention-heads 2
--vision-ffn-hidden-size 20 --vision-window-size 16 --vision-full-attention-layers 1 --image-token-id 95
--hidden-size 32 --num-attention-heads 4 --vocab-size 96 --num-layers 2 --ffn-hidden-size 48
--mock-image-size 32""".split())
MTP = ("--hybrid-layer-pattern", "ME*-M/*E/*E")
MODELS = {
    "llava": LLAVA,
    "llava-moe": (*LLAVA, *MOE),
    "llava-frozen-encoder": (*LLAVA, "--freeze", "vision"),
    "llava-frozen-language": (*LLAVA, "--freeze", "language"),
    "llava-projector-alone": (*LLAVA, "--freeze", "vision,language"),
    "llava-language-alone": (*LLAVA, "--freeze", "vision,projector"),
    "llava-frozen-projector": (*LLAVA, "--freeze", "projector"),
    "llava-recomputed": (*LLAVA, "--recompute", "full"),
    "llava-recomputed-attention": (*LLAVA, "--recompute", "selective"),
    "llava-frozen-is-not-recomputed": (*LLAVA, "--recompute", "full", "--freeze", "language"),
    "qwen3-moe": QWEN3_MOE,
    "deepseek": DEEPSEEK,
    "deepseek-plain-queries": (*DEEPSEEK, "--q-lora-rank", "0"),
    "qwen3-vl": QWEN3_VL,
    "qwen2.5-vl": QWEN25_VL,
    "qwen2.5-vl-recomputed": (*QWEN25_VL, "--recompute", "full"),
    "nemotron": NEMOTRON,
    "nemotron-latent": (*NEMOTRON, "--moe-latent-size", "16"),
    "nemotron-mtp": (*NEMOTRON, *MTP),
    "nemotron-mtp-recomputed": (*NEMOTRON, *MTP, "--recompute", "full"),
}


@pytest.mark.parametrize("name", fast_only(("llava", "nemotron"), MODELS))
def test_torch_counts_as_much(pool: WorkerPool, name: str) -> None:
    (found,) = pool.run(flops.count, MODELS[name], world_size=1)
    assert found.torch == found.hardware
    # Text-only samples and samples with several images are among them, and all have padding.
    assert len(found.text) == 3 and max(found.text) < 256
    assert all(0 < found.model[module] <= found.hardware[module] for module in found.model)


def test_a_frozen_router_computes_the_gradient_of_its_weights_all_the_same(pool: WorkerPool) -> None:
    (found,) = pool.run(flops.count, (*NEMOTRON, "--freeze", "vision,language"), world_size=1)
    assert found.torch["vision"] == found.hardware["vision"]
    assert 0 < found.torch[LANGUAGE] - found.hardware[LANGUAGE] < 0.002 * found.hardware[LANGUAGE]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "layout"), [
    (3, "--llm-dp 2"), (3, "--llm-tp 2"), (4, "--encoder-tp 2 --llm-pp 2"),
    (2, "--layout colocated --encoder-dp 2 --llm-dp 2"),
])
def test_every_layout_has_the_work_of_one_process(pool: WorkerPool, ranks: int, layout: str) -> None:
    flags = (*COMMON[:-2], *MODEL, "--global-batch-size", "4")
    (expected,) = pool.run(flops.work_of, (*flags, *ONE), 1, world_size=1)
    assert expected.text.sequences == 4 and 4 < expected.text.tokens < expected.padded.tokens == 4 * 256
    assert expected.images["vision"].sequences > 1
    for found in pool.run(flops.work_of, (*flags, *layout.split()), ranks, world_size=ranks):
        assert found == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llava", "nemotron"])
def test_packed_sequences_attend_to_themselves(pool: WorkerPool, name: str) -> None:
    flags = {"llava": (*LLAVA, *"--vision-dynamic-resolution --no-vision-class-token --global-batch-size 4".split()),
             "nemotron": (*NEMOTRON, "--global-batch-size", "4")}[name]
    (found,) = pool.run(flops.count, flags, True, world_size=1)
    assert len(found.text) > 4 and len(set(found.images)) > 2
    assert found.torch == found.hardware
