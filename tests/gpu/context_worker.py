"""Train the models of `test_context_parallel.py` on two GPUs: `torchrun context_worker.py FOLDER NAME...`.

Each model runs in float32 with local layers, in bfloat16 with Transformer Engine's on data-parallel ranks, and so on
context-parallel ranks with each way of exchanging keys and values. Rank 0 writes FOLDER/NAME.json: the losses of each
run, and for each bfloat16 run the relative error of each gradient of the first step against float32.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch.distributed as dist

BASE = """--dataset-provider mock --device cuda --global-batch-size 4 --micro-batch-size 1 --train-iters 2 --lr 1e-3
--lr-decay-style constant --num-generations 0 --watchdog-timeout-s 200 --hidden-size 256 --num-attention-heads 4
--vocab-size 512 --mock-min-length 70 --mock-max-length 120 --seq-length 128"""
TEXT = "--model-provider causal_lm --num-query-groups 2 --num-layers 2 --ffn-hidden-size 512"
# Three samples in each row, however they are padded.
PACKED = "--mock-packed-length 144 --seq-length 144 --mock-min-length 37 --mock-max-length 40"
DEEPSEEK = """--model-provider deepseek_v3 --num-layers 2 --ffn-hidden-size 512 --num-experts 4 --moe-router-topk 4
--moe-ffn-hidden-size 128 --q-lora-rank 64 --kv-lora-rank 64 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128
--first-k-dense-replace 1 --moe-shared-expert-intermediate-size 128 --moe-router-num-groups 1
--moe-router-group-topk 1 --moe-router-bias-update-rate 0 --moe-aux-loss-coeff 0"""
VISION = """--layout colocated --encoder-dp 2 --vision-hidden-size 128 --vision-num-layers 2
--vision-num-attention-heads 2 --vision-ffn-hidden-size 256 --image-token-id 511 --mock-images-max 2"""
QWEN = f"""--model-provider qwen3_vl {VISION} --num-query-groups 2 --mrope-section 12 10 10 --kv-channels 64
--num-layers 2 --ffn-hidden-size 512 --vision-patch-size 8 --vision-num-position-embeddings 64
--vision-deepstack-layers 0 --video-token-id 510"""
NEMOTRON = """--model-provider nemotron-moe-vlm-tiny --layout colocated --encoder-dp 2 --mock-image-size 32
--moe-router-bias-update-rate 0 --moe-aux-loss-coeff 0 --num-query-groups 2 --mock-max-length 90"""
# name -> (flags, ways of exchange, further flags of the context-parallel runs)
MODELS: dict[str, tuple[str, tuple[str, ...], str]] = {
    "dense": (TEXT, ("p2p", "all_gather", "a2a"), ""),
    "dense-recomputed": (TEXT, ("p2p",), "--recompute full --logits-chunk-size 24"),
    "dense-packed": (f"{TEXT} {PACKED}", ("p2p", "all_gather", "a2a"), ""),
    "experts": (f"{TEXT} --qk-layernorm --num-experts 4 --moe-router-topk 4 --moe-ffn-hidden-size 128 "
                "--moe-aux-loss-coeff 0", ("p2p",), "--llm-ep 2"),
    "latent": (DEEPSEEK, ("p2p", "all_gather", "a2a"), ""),
    "latent-packed": (f"{DEEPSEEK} {PACKED}", ("p2p", "all_gather", "a2a"), ""),
    "images": (f"{QWEN} --mock-image-size 64 --seq-length 192", ("p2p",), "--encoder-window 1"),
    "images-packed": (f"{QWEN} {PACKED} --mock-image-size 32 --mock-text-only-fraction 0", ("p2p", "all_gather", "a2a"),
                      "--encoder-window 1"),
    "hybrid": (NEMOTRON, ("p2p",), "--llm-ep 2 --encoder-window 1"),
}


def train(flags: str) -> Any:
    """Train on this rank, and return losses and the gradients of the first step."""
    from mimo.config.validate import validate
    from mimo.training.step import train_step
    from tests.support import equality

    config = equality.parse(flags.split())
    outcome, rank = equality.Outcome(), dist.get_rank()
    with equality.open_training(config, validate(config, dist.get_world_size()), rank) as (parts, loader):
        equality.note_gradients(parts, outcome)
        for step in range(config.train.train_iters):
            outcome.losses.append(train_step(parts, loader.next_step(), force_all_reduce=step == 0).loss)
    return outcome


def gathered(value: Any) -> list[Any]:
    """Return the values of all ranks."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def main(folder: str, *names: str) -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    from mimo.platform import get_platform

    platform = get_platform("cuda")
    platform.set_device(int(os.environ["LOCAL_RANK"]))
    platform.init_process_group(rank, world_size, 200)
    from tests.support.global_state import assemble, worst_errors

    for name in names or MODELS:
        flags, exchanges, further = MODELS[name]
        engine = "--bf16 --transformer-impl transformer_engine"
        runs = {"float32": f"{BASE} {flags} --llm-dp 2 --no-bf16 --transformer-impl local",
                "data-parallel": f"{BASE} {flags} --llm-dp 2 {engine}"}
        runs |= {exchange: f"{BASE} {flags} --llm-cp 2 --cp-comm-type {exchange} {further} {engine}"
                 for exchange in exchanges}
        losses, errors, exact = {}, {}, None
        for kind, words in runs.items():
            started = time.monotonic()
            try:
                outcome = train(words)
            except Exception:  # reported by the test; the next run may still work
                losses[kind], errors[kind] = [], {"failed": traceback.format_exc()[-1500:]}
                continue
            by_rank = gathered(outcome.gradients)
            exact = exact or assemble([piece for pieces in by_rank for piece in pieces])
            losses[kind], errors[kind] = outcome.losses, worst_errors(exact, by_rank)
            if rank == 0:
                print(f"{name} {kind}: {time.monotonic() - started:.0f} s", flush=True)
        if rank == 0:
            (Path(folder) / f"{name}.json").write_text(json.dumps({"losses": losses, "errors": errors}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
