"""The digits as shards, and a small llava that reads them."""

from __future__ import annotations

from pathlib import Path

MODEL = """--model-provider llava --device cpu --no-bf16 --transformer-impl local --vision-image-size 8
--vision-patch-size 4 --vision-num-channels 1 --vision-hidden-size 32 --vision-num-layers 1
--vision-num-attention-heads 4 --vision-ffn-hidden-size 64 --no-vision-class-token --num-layers 2 --hidden-size 32
--num-attention-heads 4 --num-query-groups 2 --ffn-hidden-size 64 --vocab-size 32 --make-vocab-size-divisible-by 32
--image-token-id 3 --seq-length 32 --lr 1e-3 --lr-decay-style constant --log-interval 1 --num-generations 0
--watchdog-timeout-s 100""".split()
LAYOUT = "--encoder-dp 1 --llm-dp 2 --micro-batch-size 4 --global-batch-size 16".split()
PACKED = "--encoder-dp 1 --llm-dp 2 --micro-batch-size 1 --global-batch-size 8 --seq-length 64".split()
NOTED = ("--dataset-provider", "tests.support.noted_energon:provider")


def write_shards(folder: Path, *flags: str) -> Path:
    """240 samples with images and a few of text in four shards each, by the script that users run."""
    from scripts import prepare_digits  # imported late: it imports torch

    prepare_digits.main([str(folder), "--samples", "240", "--shards", "4", "--image-size", "8", *flags])
    return folder


def data_flags(shards: Path) -> tuple[str, ...]:
    """Flags under which the pixels of shards are those of the in-memory digits."""
    return ("--data-path", str(shards / "blend.yaml"), "--tokenizer", str(shards / "tokenizer"), "--num-workers", "2",
            "--image-mean", "0.2873035294117647", "--image-std", "0.3539294117647059")


def run_training(rank: int, flags: tuple[str, ...], world_size: int) -> None:
    """A whole run on this rank of a worker pool."""
    from mimo.config.cli import parse
    from mimo.config.validate import validate
    from mimo.grid.groups import Grids
    from mimo.platform import current_platform
    from mimo.registry import dataset_provider, model_provider
    from mimo.training.loop import TrainingLoop

    config = parse(list(flags))
    layout = validate(config, world_size)
    provider, dataset = model_provider(config.model.model_provider), dataset_provider(config.data.dataset_provider)
    with Grids(layout, current_platform().backend) as grids:
        TrainingLoop(config, grids, current_platform(), provider, dataset).run()
