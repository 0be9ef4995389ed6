"""Everything that flags of RL can get wrong, one line each."""

import dataclasses

import pytest

from mimo.config.rl import RlConfig
from mimo.config.toml_file import typed_fields
from mimo.config.trainer import RunConfig


def config(**fields):
    return dataclasses.replace(RlConfig(), **fields)


@pytest.mark.parametrize("fields", [
    {},
    {"top_p": 0.9, "top_k": 50},
    {"importance_correction": "none"},
    {"importance_correction": "icepop", "importance_low": 0.2, "importance_high": 3.0, "top_k": 5},
    {"importance_correction": "sequence", "top_p": 0.5, "importance_low": 0.5},
    {"importance_correction": "sequence", "top_k": 4, "importance_low": 0.0},
    {"kl_coeff": 0.01, "ref_load": "folder"},
    {"policy_loss": "cispo", "clip_ratio_low": 1.0, "clip_ratio_high": 5.0},
    {"policy_loss": "gspo", "clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4, "dual_clip_ratio": 3.0},
    {"loss_aggregation": "seq-mean-token-sum-norm", "loss_norm_length": 512},
    {"advantage": "rloo", "completions_per_prompt": 2},
    {"temperature": 0.01, "eval_temperature": 0.01},
    {"advantage": "grpo", "completions_per_prompt": 1},
    {"kl_coeff": 0.01, "kl_in": "reward", "kl_type": "k1", "entropy_coeff": 0.001},
    {"reward": "mimo.rl.rewards.gsm8k:reward"},
])
def test_flags_that_make_sense_pass(fields):
    config(**fields).check()


@pytest.mark.parametrize(("fields", "expected"), [
    ({"temperature": 0.0}, "--temperature 0.0 is not a number above 0"),
    ({"temperature": float("nan")}, "--temperature nan"),
    ({"temperature": 0.0099}, "--temperature 0.0099 is below 0.01, the least that vLLM samples at"),
    ({"eval_temperature": 1e-6}, "--eval-temperature 1e-06 is below 0.01, the least that vLLM samples at"),
    ({"temperature": float("inf")}, "--temperature inf"),
    ({"top_p": 0.0}, "--top-p 0.0 is not in"),
    ({"top_p": 1.1}, "--top-p 1.1 is not in"),
    ({"top_p": float("nan")}, "--top-p nan"),
    ({"top_k": -1}, "--top-k -1 is below 0"),
    ({"top_p": 0.9, "importance_correction": "none"}, "^--top-p 0.9 with --importance-correction none: "),
    ({"top_k": 20, "importance_correction": "none"}, "^--top-k 20 with --importance-correction none: "),
    ({"top_p": 0.9, "top_k": 20, "importance_correction": "none"},
     "^--top-p 0.9 and --top-k 20 with .* Use --top-p 1 --top-k 0, or --importance-correction token, icepop or"),
    ({"top_p": 0.9, "importance_correction": "sequence"}, "--top-p 0.9 with --importance-correction sequence and "
     "--importance-low 0.999: .* use --importance-low 0.9 or less"),
    ({"top_p": 0.4, "importance_correction": "icepop"}, "weights are from 0.4 to 1, and those below 0.5 are cut"),
    ({"top_k": 3, "importance_correction": "sequence"}, "^--top-k 3 with --importance-correction sequence: .* set "
     "--importance-low below"),
    ({"ref_load": "x"}, "^--ref-load x with --kl-coeff 0, which needs no reference policy"),
    ({"ref_load_hf": "x"}, "^--ref-load-hf x with --kl-coeff 0"),
    ({"ref_load": "x", "ref_load_hf": "y", "kl_coeff": 0.1}, "^--ref-load x and --ref-load-hf y: the reference policy"),
    ({"completions_per_prompt": 0}, "--completions-per-prompt 0 is below 1"),
    ({"advantage": "rloo", "completions_per_prompt": 1}, "--advantage rloo with --completions-per-prompt 1"),
    ({"clip_ratio_low": 1.0}, "--clip-ratio-low 1.0 is not in"),
    ({"clip_ratio_low": -0.1}, "--clip-ratio-low -0.1 is not in"),
    ({"clip_ratio_low": 1.1, "policy_loss": "cispo"}, "--clip-ratio-low 1.1 is not in"),
    ({"clip_ratio_high": -0.1}, "--clip-ratio-high -0.1"),
    ({"clip_ratio_high": float("inf")}, "--clip-ratio-high inf"),
    ({"dual_clip_ratio": 1.0}, "--dual-clip-ratio 1.0 is not a number above 1"),
    ({"dual_clip_ratio": 3.0, "policy_loss": "cispo"}, "--dual-clip-ratio 3.0 is for --policy-loss ppo and gspo"),
    ({"entropy_coeff": -1.0}, "--entropy-coeff -1.0"),
    ({"kl_coeff": -1.0}, "--kl-coeff -1.0"),
    ({"kl_coeff": float("nan")}, "--kl-coeff nan"),
    ({"loss_aggregation": "seq-mean-token-sum-norm"}, "needs --loss-norm-length"),
    ({"loss_norm_length": 10}, "--loss-norm-length 10 is for --loss-aggregation seq-mean-token-sum-norm"),
    ({"loss_aggregation": "seq-mean-token-sum-norm", "loss_norm_length": 0}, "--loss-norm-length 0 is below 1"),
    ({"importance_cap": 0.5}, "--importance-cap 0.5 is not a number from 1 on"),
    ({"importance_low": 0.5}, "--importance-low 0.5 is for --importance-correction icepop and sequence, not for token"),
    ({"importance_high": 2.0, "importance_correction": "none"}, "--importance-high 2.0 is for .* not for none"),
    ({"importance_low": 1.5, "importance_correction": "icepop"}, "--importance-low 1.5 is not in"),
    ({"importance_high": 0.9, "importance_correction": "sequence"}, "--importance-high 0.9 is not a number from 1 on"),
    ({"max_tokens_per_microbatch": 0}, "--max-tokens-per-microbatch 0 is below 1"),
    ({"reward": "nothing"}, "--reward nothing: unknown"),
])
def test_flags_that_make_no_sense_are_refused(fields, expected):
    with pytest.raises(ValueError, match=expected):
        config(**fields).check()


def test_names_of_flags_are_those_of_no_other_section():
    others = {name for field in dataclasses.fields(RunConfig) if field.default_factory is not dataclasses.MISSING
              for name in typed_fields(field.default_factory)}
    assert len(others) > 50 and not others & set(typed_fields(RlConfig))


def test_bands_of_the_corrections():
    assert config(importance_correction="icepop").importance_band == (0.5, 5.0)
    assert config(importance_correction="sequence").importance_band == (0.999, 1.002)
    assert config(importance_correction="sequence", importance_low=0.9).importance_band == (0.9, 1.002)
