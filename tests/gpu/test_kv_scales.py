"""Scales of an FP8 cache on a GPU: answers change as they do with vLLM's own calibration."""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from mimo.refit.kv_scales import set_scales
from tests.support import kv_scales

pytest.importorskip("vllm")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU"),
              pytest.mark.timeout(580)]

# vLLM divides the largest key by 200, the largest value by 100 and the largest query by 200.
RANGES = (200.0, 100.0, 200.0)


def save(folder: Path) -> kv_scales.Largest:
    """Save a model whose largest keys, values and queries do not fit into e4m3, and return these for each layer."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(1)
    config = Qwen3Config(vocab_size=512, hidden_size=512, intermediate_size=512, num_hidden_layers=3,
                         num_attention_heads=8, num_key_value_heads=2, head_dim=64, max_position_embeddings=512,
                         tie_word_embeddings=False, dtype="bfloat16")
    model = Qwen3ForCausalLM(config).bfloat16()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_norm.weight[3] *= 300.0
            layer.self_attn.q_norm.weight[3] *= 0.03
            layer.self_attn.q_norm.weight[7] *= 300.0
            layer.self_attn.k_norm.weight[7] *= 0.03
            layer.self_attn.v_proj.weight *= 2000.0
            layer.self_attn.o_proj.weight /= 100.0
    model.save_pretrained(folder)
    return kv_scales.largest(model)


def start(folder: Path, **settings: Any) -> Any:
    from vllm import LLM

    return LLM(str(folder), dtype="bfloat16", enforce_eager=True, max_model_len=64, max_num_seqs=8,
               skip_tokenizer_init=True, gpu_memory_utilization=0.2, enable_prefix_caching=False, **settings)


def logprobs(engine: Any) -> torch.Tensor:
    """Log-probs of all tokens of `SEQUENCES` but the first of each."""
    from vllm import SamplingParams

    outputs = engine.generate([{"prompt_token_ids": tokens} for tokens in kv_scales.SEQUENCES],
                              SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False))
    return torch.tensor([found[token].logprob for output in outputs
                         for token, found in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)])


def layers_of(model: Any) -> list[Any]:
    from vllm.model_executor.layers.attention import Attention

    return [each for each in model.modules() if isinstance(each, Attention)]


def calibrate(model: Any) -> None:
    """Have vLLM measure its scales in the next step; at the start, it has measured them on dummy tokens."""
    for layer in layers_of(model):
        layer.calculate_kv_scales = True


def scales_of(model: Any) -> list[tuple[float, ...]]:
    return [tuple(float(getattr(each, f"_{kind}_scale")) for kind in "kvq") for each in layers_of(model)]


def test_answers_change_as_with_the_calibration_of_vllm(tmp_path, monkeypatch):
    from vllm.config import CacheConfig

    if "calculate_kv_scales" not in {each.name for each in fields(CacheConfig)}:
        pytest.skip("this vLLM has no calibration of its own")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    largest = save(tmp_path)
    exact = start(tmp_path)
    expected = logprobs(exact)
    del exact
    engine = start(tmp_path, kv_cache_dtype="fp8", calculate_kv_scales=True)
    engine.apply_model(calibrate)
    logprobs(engine)
    (own,) = engine.apply_model(scales_of)
    found = {"vllm": logprobs(engine)}

    def bring(scales):
        engine.apply_model(partial(set_scales, scales=scales))
        return logprobs(engine)

    ours = kv_scales.expected(largest)
    found["ours"] = bring(ours)
    found["ours, queries with a scale of 1"] = bring({layer: (*each[:2], 1.0) for layer, each in ours.items()})
    found["one"] = bring({})
    found["vllm again"] = bring(dict(enumerate(own)))
    errors = {name: (float((each - expected).abs().mean()), float((each - expected).abs().max()))
              for name, each in found.items()}
    print("largest", largest, "vLLM's scales", own, "errors", errors)
    for layer, expected_of in largest.items():
        for scale, divisor, each in zip(own[layer], RANGES, expected_of, strict=True):
            # Layers after the first get what attention in FP8 made.
            assert scale * divisor == pytest.approx(each, rel=0.25 if layer else 0.02)
    assert torch.equal(found["vllm again"], found["vllm"])
    assert errors["one"][0] > 2 * errors["vllm"][0]  # scales of 1 cut the largest keys, values and queries off
    assert errors["ours, queries with a scale of 1"][0] > errors["ours"][0]
    assert errors["ours"][0] < 1.5 * errors["vllm"][0]
