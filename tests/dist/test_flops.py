"""FLOPs that the trainer says against those that torch counts in the passes of a step, for real models of every family.

Torch sees what the layers in plain PyTorch compute: padding, whole score matrices, recomputation, and no convolution of
Mamba layers, which multiplies element by element. That is `FlopsCounter.hardware_flops` without convolutions. Rows are
two chunks of the scan: of a single one torch's autograd leaves out the gradients of states that nobody reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mimo.config.cli import parse
from mimo.config.validate import validate
from mimo.data.batch import Microbatch
from mimo.observability.flops import FlopsCounter
from mimo.protocols import LANGUAGE
from mimo.registry import model_provider
from tests.support import equality, packing
from tests.support.equality import BASE, MODEL, MOE
from tests.support.marks import fast_only
from tests.support.spawn import WorkerPool

if TYPE_CHECKING:
    from mimo.training.step_metrics import Workload


@dataclass
class Counted:
    """FLOPs of forward and backward passes of one step.

    Attributes:
        torch: by module, as torch's counter saw them.
        hardware: by module, as `FlopsCounter.hardware_flops` says, without convolutions, which torch's does not see.
        model: by module, as `FlopsCounter.model_flops` says.
        text: tokens of each sequence of the batch, padding excluded.
        images: language tokens of each image.
    """

    torch: dict[str, float]
    hardware: dict[str, float]
    model: dict[str, float]
    text: list[int]
    images: list[int]


def count(rank: int, flags: tuple[str, ...], packed: bool = False) -> Counted:
    """Run one step on one process that has all modules, with packed rows of `tests.support.packing` or the flags'."""
    from mimo.model.mtp import begin_mtp_step
    from mimo.training.step import forward_step, run_schedule
    from mimo.training.step_metrics import FlopsMeter, workload

    config = parse(list(flags))
    layout, provider = validate(config, 1), model_provider(config.model.model_provider)
    with equality.open_trainer(config, layout) as parts:
        microbatches = _packed(parts) if packed else _loaded(parts, rank)
        begin_mtp_step(parts.built.model.mtp, microbatches, parts.grids.collections.get(LANGUAGE), torch.device("cpu"))
        with FlopCounterMode(display=False) as counter:
            run_schedule(parts, microbatches, forward_step, forward_only=False)
    meter = FlopsMeter.of(config, provider, layout, impl="local", device_name="")
    assert meter is not None
    work = workload(microbatches, [encoder.name for encoder in layout.encoders])
    seen = FlopsCounter([replace(component, convolution=0.0) for component in meter.counter.components],
                        frozen=config.model.frozen, recompute=config.model.recompute,
                        encoder_recompute=config.model.encoder_recompute, fused=False)
    texts = [batch.text for batch in microbatches if batch.text is not None]
    return Counted(
        _by_module(counter, list(layout.grids)), seen.hardware_flops({LANGUAGE: work.padded, **work.images}),
        meter.figures(work, 1.0)["flops"], [length for text in texts for row in text.lengths for length in row],
        [tokens for text in texts for images in text.image_lengths.values() for tokens in images])


def work_of(rank: int, flags: tuple[str, ...], world_size: int) -> Workload:
    """Return the figures of the global batch that a step of a layout records."""
    from mimo.training.step import train_step

    config = parse(list(flags))
    with equality.open_trainer(config, validate(config, world_size)) as parts:
        return train_step(parts, _loaded(parts, rank)).work


def _by_module(counter: FlopCounterMode, names: Sequence[str]) -> dict[str, float]:
    """The counter's modules; the language model has what no encoder has, for backward passes lose its name at times."""
    counts: Any = counter.get_flop_counts()
    found = {name: float(sum(sum(ops.values()) for key, ops in counts.items()
                             if key == f"HeteroModel.modality_submodules.{name}"))
             for name in names if name != LANGUAGE}
    return found | {LANGUAGE: counter.get_total_flops() - sum(found.values())}


def _packed(parts: Any) -> list[Microbatch]:
    spec = model_provider(parts.config.model.model_provider).token_spec(parts.config.model_family)
    packs = packing.make_samples(spec, ((16, 16), (16, 48), (32, 16), (32, 48)))
    length = parts.config.train.seq_length
    return [packing.microbatch([packing.join(samples)], parts, length) for samples in packs]


def _loaded(parts: Any, rank: int) -> list[Microbatch]:
    loader = equality.make_loader(parts.config, parts.grids.layout, rank)
    try:
        return list(loader.next_step())
    finally:
        loader.close()


COMMON = (*BASE, "--seq-length", "256", "--global-batch-size", "3")
ONE = ("--layout", "colocated")
LLAVA = (*COMMON, *MODEL, *ONE)
NEMOTRON = (*COMMON, *ONE, *"""--model-provider nemotron-moe-vlm-tiny --mock-image-size 32 --image-token-id 95
--row-lengths 1""".split())
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
MODELS = {"llava": LLAVA, "llava-moe": (*LLAVA, *MOE), "llava-frozen-encoder": (*LLAVA, "--freeze", "vision"),
          "llava-frozen-language": (*LLAVA, "--freeze", "language"),
          "llava-projector-alone": (*LLAVA, "--freeze", "vision,language"),
          "llava-language-alone": (*LLAVA, "--freeze", "vision,projector"),
          "llava-frozen-projector": (*LLAVA, "--freeze", "projector"),
          "llava-recomputed": (*LLAVA, "--recompute", "full"),
          "llava-recomputed-attention": (*LLAVA, "--recompute", "selective"),
          "llava-frozen-language-recomputed": (*LLAVA, "--recompute", "full", "--freeze", "language"),
          "qwen3-moe": QWEN3_MOE, "deepseek": DEEPSEEK, "deepseek-plain-queries": (*DEEPSEEK, "--q-lora-rank", "0"),
          "qwen3-vl": QWEN3_VL, "qwen2.5-vl": QWEN25_VL, "qwen2.5-vl-recomputed": (*QWEN25_VL, "--recompute", "full"),
          "nemotron": NEMOTRON, "nemotron-latent": (*NEMOTRON, "--moe-latent-size", "16"),
          "nemotron-mtp": (*NEMOTRON, *MTP), "nemotron-mtp-recomputed": (*NEMOTRON, *MTP, "--recompute", "full"),
          "llava-frozen-recomputed-attention": (*LLAVA, "--recompute", "selective", "--freeze", "language")}


@pytest.mark.parametrize("name", fast_only(("llava", "nemotron"), MODELS))
def test_torch_counts_as_much(pool: WorkerPool, name: str) -> None:
    (found,) = pool.run(count, MODELS[name], world_size=1)
    assert found.torch == found.hardware
    # Text-only samples and samples with several images are among them, and all have padding.
    assert len(found.text) == 3 and max(found.text) < 256
    assert all(0 < found.model[module] <= found.hardware[module] for module in found.model)


def test_a_frozen_router_computes_the_gradient_of_its_weights_all_the_same(pool: WorkerPool) -> None:
    (found,) = pool.run(count, (*NEMOTRON, "--freeze", "vision,language"), world_size=1)
    assert found.torch["vision"] == found.hardware["vision"]
    assert 0 < found.torch[LANGUAGE] - found.hardware[LANGUAGE] < 0.002 * found.hardware[LANGUAGE]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "layout"), [(3, "--llm-dp 2"), (3, "--llm-tp 2"), (4, "--encoder-tp 2 --llm-pp 2"),
                                               (2, "--layout colocated --encoder-dp 2 --llm-dp 2")])
def test_every_layout_has_the_work_of_one_process(pool: WorkerPool, ranks: int, layout: str) -> None:
    flags = (*COMMON[:-2], *MODEL, "--global-batch-size", "4")
    (expected,) = pool.run(work_of, (*flags, *ONE), 1, world_size=1)
    assert expected.text.sequences == 4 and 4 < expected.text.tokens < expected.padded.tokens < 4 * 256
    assert expected.images["vision"].sequences > 1
    for found in pool.run(work_of, (*flags, *layout.split()), ranks, world_size=ranks):
        assert found == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llava", "nemotron"])
def test_packed_sequences_attend_to_themselves(pool: WorkerPool, name: str) -> None:
    flags = {"llava": (*LLAVA, *"--vision-dynamic-resolution --no-vision-class-token --global-batch-size 4".split()),
             "nemotron": (*NEMOTRON, "--global-batch-size", "4")}[name]
    (found,) = pool.run(count, flags, True, world_size=1)
    assert len(found.text) > 4 and len(set(found.images)) > 2
    assert found.torch == found.hardware
