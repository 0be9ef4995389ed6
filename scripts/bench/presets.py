"""Flags of the models and data that benchmarks of training take where none are given."""

from __future__ import annotations

# Images of one size; how many a sample has varies, from 1 on.
TINY = """--model-provider mock --dataset-provider mock --seq-length 96 --micro-batch-size 1 --global-batch-size 8
--mock-images-max 3 --mock-text-only-fraction 0 --mock-min-length 16 --mock-max-length 40 --lr 1e-4
--lr-decay-style constant""".split()

# So small that it takes no time beside sleeps.
SMALLEST = """--num-layers 2 --hidden-size 32 --num-attention-heads 4 --num-query-groups 2 --ffn-hidden-size 64
--vocab-size 96 --image-token-id 95 --vision-num-layers 2 --vision-hidden-size 32 --vision-num-attention-heads 4
--vision-ffn-hidden-size 64 --vision-image-size 16 --seq-length 64""".split()

# A language model of 3.0 billion parameters, as Llama 3.2 of that size has them, and a vision transformer of 0.57
# billion. A vision transformer's patches become language tokens in squares.
_GPU = """--model-provider llava --num-layers 28 --hidden-size 3072 --ffn-hidden-size 8192 --num-attention-heads 24
--num-query-groups 8 --max-position-embeddings 4096 --vision-hidden-size 1536 --vision-num-layers 20
--vision-num-unused-layers 0 --vision-num-attention-heads 24 --vision-ffn-hidden-size 6144
--dataset-provider mock --mock-text-only-fraction 0 --seq-length 4096 --micro-batch-size 1 --global-batch-size 12
--lr 1e-5 --lr-decay-style constant""".split()

PRESETS: dict[str, list[str]] = {
    # 1024 patches and 256 tokens an image: the encoder has about a quarter of the work.
    "h200": [*_GPU, *"""--vision-image-size 448 --vision-pixel-shuffle 2 --mock-images-max 13 --mock-min-length 256
                       --mock-max-length 768""".split()],
    # 2304 patches and 144 tokens an image: about half of it.
    "h200-even": [*_GPU, *"""--vision-image-size 672 --vision-pixel-shuffle 4 --mock-images-max 14
                            --mock-min-length 1024 --mock-max-length 2048""".split()],
    "tiny": TINY,
    "smallest": [*TINY, *SMALLEST],
    "none": [],
}
DEFAULT = {"cpu": "tiny", "cuda": "h200"}
# What a machine without GPUs needs, or what one with them is measured with.
ON_DEVICE = {"cpu": ["--no-bf16", "--transformer-impl", "local"], "cuda": ["--bf16"]}


def flags(device: str, preset: str) -> list[str]:
    """Flags that stand before the user's own.

    Args:
        device: `cpu` or `cuda`.
        preset: a name of `PRESETS`.
    """
    return [*PRESETS[preset], *ON_DEVICE[device], "--device", device]


def check_gpus(device: str, ranks: int) -> None:
    """Raise ValueError where this host has fewer GPUs than ranks are to run on."""
    if device == "cpu":
        return
    import torch  # for this alone

    there = torch.cuda.device_count()
    if ranks > there:
        raise ValueError(f"--device cuda: the grids have {ranks} ranks, this host has {there} GPUs")
