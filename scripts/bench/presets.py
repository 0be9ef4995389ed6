"""Models and data that the benchmarks use unless flags say otherwise.

    python scripts/bench/presets.py h200-even

The program prints the flags of a preset, for programs that have no --preset of their own.
"""

from __future__ import annotations

import argparse
from typing import Any

# config.json of Hugging Face, for models with random weights.
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu", "rms_norm_eps": 1e-6,
         "attention_bias": False, "rope_theta": 1e6, "max_position_embeddings": 4096, "vocab_size": 151936,
         "head_dim": 128, "bos_token_id": 0, "eos_token_id": 1}
QWEN3_MOE = QWEN3 | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "decoder_sparse_step": 1,
                     "mlp_only_layers": [], "norm_topk_prob": True}
MODELS: dict[str, dict[str, Any]] = {
    "tiny": QWEN3_MOE | {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 1000,
                         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_experts": 8,
                         "num_experts_per_tok": 2, "moe_intermediate_size": 64, "tie_word_embeddings": False},
    "qwen3-0.6b": QWEN3 | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
                           "num_attention_heads": 16, "num_key_value_heads": 8, "tie_word_embeddings": True},
    "qwen3-4b": QWEN3 | {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
                         "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": True},
    "qwen3-30b-a3b": QWEN3_MOE | {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
                                  "num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": 128,
                                  "num_experts_per_tok": 8, "moe_intermediate_size": 768,
                                  "tie_word_embeddings": False},
}

# Flags of train_hetero.py. Images have one size; their number varies from one sample to the next.
TINY = """--model-provider mock --dataset-provider mock --seq-length 96 --micro-batch-size 1 --global-batch-size 8
--mock-images-max 3 --mock-text-only-fraction 0 --mock-min-length 16 --mock-max-length 40 --lr 1e-4
--lr-decay-style constant""".split()

# So small that its own time is nothing beside the sleeps of schedule.py --synthetic.
SMALLEST = """--num-layers 2 --hidden-size 32 --num-attention-heads 4 --num-query-groups 2 --ffn-hidden-size 64
--vocab-size 96 --image-token-id 95 --vision-num-layers 2 --vision-hidden-size 32 --vision-num-attention-heads 4
--vision-ffn-hidden-size 64 --vision-image-size 16 --seq-length 64""".split()

# A language model of 3.0 billion parameters in the shape of Llama 3.2 3B, and a vision transformer of 0.57 billion.
# Pixel shuffle makes one language token of a square of patches.
_GPU = """--model-provider llava --num-layers 28 --hidden-size 3072 --ffn-hidden-size 8192 --num-attention-heads 24
--num-query-groups 8 --max-position-embeddings 4096 --vision-hidden-size 1536 --vision-num-layers 20
--vision-num-unused-layers 0 --vision-num-attention-heads 24 --vision-ffn-hidden-size 6144
--dataset-provider mock --mock-text-only-fraction 0 --seq-length 4096 --micro-batch-size 1 --global-batch-size 12
--lr 1e-5 --lr-decay-style constant""".split()

# Models of 9.7 and 13.2 billion parameters. On two GPUs of 141 GB data parallelism has no room for them without
# recomputation, or none at all.
_10B = "--num-layers 40 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32".split()
_13B = "--num-layers 44 --hidden-size 5120 --ffn-hidden-size 13824 --num-attention-heads 40".split()
# 21.9 billion parameters, for four GPUs of 141 GB: they hold it in four parts, but not in two.
_22B = """--num-layers 52 --hidden-size 6144 --ffn-hidden-size 16384 --num-attention-heads 48
--global-batch-size 24""".split()
# With five images of 672 pixels a sample the encoder of 20 layers computes 17 % of the FLOPs of the smaller model, with
# padding; 52 layers compute 35 %.
_SHARE_35 = ["--vision-num-layers", "52"]
# Images of 672 pixels, 2304 patches and 144 tokens, five in every sample.
_EVEN = """--vision-image-size 672 --vision-pixel-shuffle 4 --mock-min-length 1024 --mock-max-length 2048
--mock-images-mean 5 --mock-images-max 5""".split()
# Such images on average, packed. Draws are clipped, so the numbers of images and their areas have a coefficient of
# variation of 0.7 (measured over 6,000 samples, one of which is longer than --seq-length).
_UNEVEN = """--vision-image-size 672 --vision-pixel-shuffle 4 --mock-min-length 256 --mock-max-length 768
--vision-dynamic-resolution --no-vision-class-token --mock-images-mean 5 --mock-images-cv 0.8 --mock-images-max 16
--mock-image-size 672 --mock-image-size-cv 0.75""".split()

# The shapes of Qwen3-VL-2B with a frozen tower; a sample is one video. Two frames of 448 pixels are 196 tokens, so
# --seq-length 32768 takes --mock-video-frames 328, 65536 takes 662, and 131072 takes 1330.
_LONG_VIDEO = """--model-provider qwen3_vl --num-layers 28 --hidden-size 2048 --ffn-hidden-size 6144
--num-attention-heads 16 --num-query-groups 8 --kv-channels 128 --no-untie-embeddings-and-output-weights
--max-position-embeddings 1048576
--vision-hidden-size 1024 --vision-num-layers 24 --vision-ffn-hidden-size 4096 --vision-deepstack-layers 5 11 17
--freeze vision --dataset-provider mock --mock-text-only-fraction 0 --mock-images-mean 1 --mock-images-max 1
--mock-video-fraction 1 --mock-image-size 448 --mock-min-length 600 --mock-max-length 600 --seq-length 32768
--mock-video-min-frames 328 --mock-video-frames 328 --logits-chunk-size 4096 --micro-batch-size 1 --global-batch-size 2
--lr 1e-5 --lr-decay-style constant""".split()

PRESETS: dict[str, list[str]] = {
    # 1024 patches and 256 tokens an image: the encoder has about a quarter of the work.
    "h200": [*_GPU, *"""--vision-image-size 448 --vision-pixel-shuffle 2 --mock-images-max 13 --mock-min-length 256
                       --mock-max-length 768""".split()],
    # 2304 patches and 144 tokens an image: the encoder has about half of the work.
    "h200-even": [*_GPU, *"""--vision-image-size 672 --vision-pixel-shuffle 4 --mock-images-max 14
                            --mock-min-length 1024 --mock-max-length 2048""".split()],
    "10b-even": [*_GPU, *_10B, *_EVEN],
    "10b-uneven": [*_GPU, *_10B, *_UNEVEN],
    "13b-even": [*_GPU, *_13B, *_EVEN],
    "13b-uneven": [*_GPU, *_13B, *_UNEVEN],
    "22b-even": [*_GPU, *_22B, *_EVEN],
    "22b-uneven": [*_GPU, *_22B, *_UNEVEN],
    "10b-share35-even": [*_GPU, *_10B, *_SHARE_35, *_EVEN],
    "10b-share35-uneven": [*_GPU, *_10B, *_SHARE_35, *_UNEVEN],
    "long-video": _LONG_VIDEO,
    "tiny": TINY,
    "smallest": [*TINY, *SMALLEST],
    "none": [],
}
DEFAULT = {"cpu": "tiny", "cuda": "h200"}
ON_DEVICE = {"cpu": ["--no-bf16", "--transformer-impl", "local"], "cuda": ["--bf16"]}


def flags(device: str, preset: str) -> list[str]:
    """Return the flags that precede the user's own.

    Args:
        device: `cpu` or `cuda`.
        preset: a name of `PRESETS`.
    """
    return [*PRESETS[preset], *ON_DEVICE[device], "--device", device]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset", choices=PRESETS)
    parser.add_argument("--device", choices=DEFAULT, default="cuda", help="cpu adds float32 and local layers (cuda)")
    chosen = parser.parse_args()
    print(*flags(chosen.device, chosen.preset))
