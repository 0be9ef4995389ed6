"""Shapes of models that benchmarks build with random weights, as config.json of Hugging Face."""

from __future__ import annotations

from typing import Any

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
