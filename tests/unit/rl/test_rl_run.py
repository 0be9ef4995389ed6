"""Flags of train_rl.py: one set with the trainer's, what is refused, and what the engine is made of."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import tomllib
from pathlib import Path

import pytest

from mimo import registry
from mimo.config.cli import parse_as, to_toml
from mimo.config.rl import RlConfig, RolloutConfig
from mimo.config.rl_run import DESCRIPTION, RlRunConfig, validate_rl
from mimo.config.toml_file import typed_fields
from mimo.config.trainer import RunConfig
from mimo.rl.launch_engine import engine_options, refit_options
from mimo.rollout.process import leave_launcher

FLAGS = """--model-provider causal_lm --num-layers 2 --hidden-size 64 --num-attention-heads 2 --ffn-hidden-size 64
--vocab-size 100 --no-bf16 --device cpu --transformer-impl local --seq-length 64 --max-completion-tokens 16
--max-tokens-per-microbatch 128 --global-batch-size 16 --completions-per-prompt 4 --train-iters 3""".split()

HYBRID = ["--model-provider", "nemotron_h", *FLAGS[FLAGS.index("--num-layers") + 2:], "--kv-channels", "32",
          "--num-query-groups", "1", "--mamba-num-heads", "4", "--mamba-head-dim", "8", "--mamba-num-groups", "2"]


def parsed(*flags: str) -> RlRunConfig:
    return parse_as(RlRunConfig, [*FLAGS, *flags], DESCRIPTION)


def test_flags_of_trainer_algorithm_engine_and_prompts_are_flat():
    config = parsed("--clip-ratio-high", "0.3", "--engine-tp", "2", "--arithmetic-max", "20", "--lr", "1e-4")
    assert (config.rl.clip_ratio_high, config.rollout.engine_tp, config.dataset.arithmetic_max, config.optim.lr) == (
        0.3, 2, 20, 1e-4)
    assert config.prompts_per_step == 4
    assert validate_rl(config, 1).world_size == 1


def test_the_configuration_reads_back_from_its_file(tmp_path):
    config = parsed("--kl-type", "k2", "--rollout-timeout-s", "30")
    (tmp_path / "run_config.toml").write_text(to_toml(config))
    assert parse_as(RlRunConfig, ["--config", str(tmp_path / "run_config.toml")], DESCRIPTION) == config


@pytest.mark.parametrize(("flags", "limit"), [
    ("", 1e-4), ("--bf16", 0.05), ("--engine-kv-cache-dtype fp8", 0.05), ("--updates-per-rollout 2", 1e-4),
    ("--max-gen-kl 0.3", 0.3), ("--max-gen-kl 0", None), ("--rollout-mode one-step-off", None), ("--top-p 0.9", None),
    ("--top-k 5", None), ("--top-k 5 --max-gen-kl 1", 1.0)])
def test_gen_kl_has_a_limit_where_engine_and_trainer_should_agree(flags, limit):
    assert parsed(*flags.split()).max_gen_kl == limit


@pytest.mark.parametrize(("flags", "low", "high", "mean"), [
    ("", 0.2, 0.2, "token-mean"),
    ("--policy-loss gspo", 3e-4, 4e-4, "seq-mean-token-mean"),
    ("--policy-loss gspo --clip-ratio-low 1e-3 --loss-aggregation token-mean", 1e-3, 4e-4, "token-mean"),
    ("--policy-loss cispo", 1.0, 4.0, "token-mean"),
])
def test_print_config_shows_what_the_policy_loss_uses(flags, low, high, mean, capsys):
    with pytest.raises(SystemExit):
        parsed(*flags.split(), "--print-config")
    printed = tomllib.loads(capsys.readouterr().out)["rl"]
    assert [printed[name] for name in ("clip-ratio-low", "clip-ratio-high", "loss-aggregation")] == [low, high, mean]


def test_a_file_that_names_the_loss_does_not_fix_the_range_of_another(tmp_path):
    (tmp_path / "run.toml").write_text(to_toml(parsed("--policy-loss", "gspo")))  # as in run_config.toml
    config = parsed("--config", str(tmp_path / "run.toml"), "--policy-loss", "ppo")
    assert (config.rl.clip_range, config.rl.aggregation) == ((0.2, 0.2), "token-mean")


def test_names_of_flags_are_those_of_no_other_section():
    others = {name for field in dataclasses.fields(RunConfig) if field.default_factory is not dataclasses.MISSING
              for name in typed_fields(field.default_factory)}
    own = [*typed_fields(RlConfig), *typed_fields(RolloutConfig)]
    assert len(others) > 50 and len(set(own)) == len(own) and not others & set(own)


def test_sections_of_their_own_keep_types_and_defaults_of_the_trainer():
    changed = {("data", "dataset_provider")}
    for section in dataclasses.fields(RunConfig):
        ours, theirs = getattr(RlRunConfig(), section.name), getattr(RunConfig(), section.name)
        if theirs is None:
            continue
        types = typed_fields(type(ours))
        for name, kind in typed_fields(type(theirs)).items():
            assert types[name] == kind, name
            assert (section.name, name) in changed or vars(ours)[name] == vars(theirs)[name], name


def test_help_says_which_flags_are_for_train_hetero_alone(capsys):
    with pytest.raises(SystemExit):
        parsed("--help")
    text = " ".join(re.sub("[│╭╮╰╯─]", " ", capsys.readouterr().out).split())
    for flag in ("micro-batch-size", "eval-iters", "encoder-prefetch-depth", "lane-loader", "llm-only",
                 "no-correct-encoder-grad-for-partial-participation"):
        assert re.search(rf"--{flag}(,? [^ ]+)? train_hetero\.py only", text), flag
    assert "--global-batch-size INT Completions of one iteration; a multiple of --completions-per-prompt." in text


@pytest.mark.parametrize(("flags", "expected"), [
    ("--global-batch-size 18", "--global-batch-size 18 counts completions; .* nearest are 16 and 20"),
    ("--micro-batch-size 2", "--micro-batch-size 2: microbatches are made by --max-tokens-per-microbatch"),
    ("--max-tokens-per-microbatch 63", "--max-tokens-per-microbatch 63 is below --seq-length 64"),
    ("--max-completion-tokens 64", "--max-completion-tokens 64 leaves no room for a prompt in --seq-length 64"),
    ("--engine-tp 0", "--engine-tp 0 is below 1"),
    ("--engine-share-experts --engine-dp 2 --engine-pp 2", "--engine-share-experts with --engine-pp 2 is not supp"),
    ("--engine-share-experts --engine-dp 2", "--engine-share-experts with --model-provider .*: this model has no exp"),
    ("--engine-ep", "--engine-ep with --model-provider .*: this model has no experts"),
    ("--engine-tp 3", "--engine-tp 3 does not divide --num-attention-heads 2"),
    ("--num-attention-heads 12 --num-query-groups 3 --kv-channels 8 --engine-tp 2",
     "--engine-tp 2 and --num-query-groups 3: one must divide the other"),
    ("--engine-placement colocated --engine-tp 2 --device cuda",
     "--engine-placement colocated: --engine-dp 1 --engine-tp 2 --engine-pp 1 need 2 trainer ranks, .* the run has 1"),
    ("--engine-share-experts", "--engine-share-experts with --engine-dp 1: there is no other replica to share"),
    ("--engine-share-experts --engine-dp 2 --engine-tp 2 --engine-nodes 2 --engine-placement ray --ray-address auto",
     "--engine-share-experts with --engine-nodes 2 is not supported: give each replica the workers of one node"),
    ("--engine-tp 2 --engine-nodes 2", "--engine-nodes 2 needs a Ray cluster: give --ray-address, and"),
    ("--engine-tp 3 --engine-nodes 2 --engine-placement ray --ray-address auto",
     r"--engine-nodes 2 does not divide the 3 workers of a replica \(--engine-tp 3 \* --engine-pp 1\)"),
    ("--engine-restarts 1 --engine-placement colocated", "--engine-restarts 1 with --engine-placement colocated is"),
    ("--engine-restarts 1 --rollout-mode one-step-off", "--engine-restarts 1 with --rollout-mode one-step-off is not"),
    ("--fp8-primary-weights --fp8-format hybrid --bf16",
     "--fp8-primary-weights: refits and reference policies need the weights in bfloat16"),
    ("--max-gen-kl nan", r"--max-gen-kl nan is not a number from 0 on \(0: no limit\)"),
    ("--refit-verify-interval -1", r"--refit-verify-interval -1 is below 0 \(0: verify no refit\)"),
    ("--engine-quantization fp8_per_block", "--engine-quantization fp8_per_block needs --device cuda and --bf16"),
    ("--engine-kv-cache-mib 0", "--engine-kv-cache-mib 0 is below 1"),
    ("--engine-kv-scales calibrated", "--engine-kv-scales calibrated with --engine-kv-cache-dtype auto: only an FP8"),
    ("--engine-kv-scales calibrated --engine-kv-cache-dtype fp8 --model-provider deepseek_v3 "
     "--first-k-dense-replace 1",
     "--engine-kv-scales calibrated with --model-provider deepseek_v3 is not supported: latent attention caches"),
    ("--engine-kv-scales calibrated --engine-kv-cache-dtype fp8 --device cuda --no-bf16",
     "--engine-kv-scales calibrated with --device cuda needs --bf16: vLLM's FLASH_ATTN"),
    ("--rollout-timeout-s 0", "--rollout-timeout-s 0.0 is not above 0 and at most 604800"),
    ("--engine-start-timeout-s nan", "--engine-start-timeout-s nan is not above 0"),
    ("--refit-timeout-s 1e6", "--refit-timeout-s 1000000.0 is not above 0 and at most 604800"),
    ("--ref-load x", "--ref-load x with --kl-coeff 0, which needs no reference policy"),
    ("--num-generations 3", "--num-generations 3 with --eval-prompts 0: completions of held-out prompts are shown"),
    ("--eval-iters 2", "--eval-iters 2 is for train_hetero.py; --eval-prompts says how many"),
    ("--eval-interval 1", "--eval-interval 1 with --eval-prompts 0 evaluates nothing: set --eval-prompts"),
    ("--eval-interval -1", "--eval-interval -1 is below 0"),
    ("--eval-prompts -1", "--eval-prompts -1 is below 0"),
    ("--eval-temperature nan", "--eval-temperature nan is not a number from 0 on"),
    ("--rollout-mode one-step-off --importance-correction none",
     "--rollout-mode one-step-off with --importance-correction none: completions come from the policy before"),
    ("--rollout-mode one-step-off --engine-placement colocated",
     "--rollout-mode one-step-off with --engine-placement colocated: the engine cannot generate beside the update"),
    ("--rollout-mode one-step-off --max-refills 1",
     "--rollout-mode one-step-off with --max-refills 1: completions that are drawn beside the update are scored after"),
    ("--max-refills -1", "--max-refills -1 is below 0"), ("--reward-threads 0", "--reward-threads 0 is below 1"),
    ("--max-refills 1 --completions-per-prompt 1", "--max-refills 1 with --completions-per-prompt 1: a single compl"),
    ("--hidden-dropout 0.1", "--hidden-dropout 0.1: the policy that is trained"),
    ("--updates-per-rollout 0", "--updates-per-rollout 0 is below 1"),
    ("--updates-per-rollout 3", "--updates-per-rollout 3 does not divide the 4 prompts that --global-batch-size 16"),
    ("--encoder-prefetch-depth 2", "--encoder-prefetch-depth 2 is for train_hetero.py: the prompts of the next step"),
    ("--lane-loader per-lane", "--lane-loader per-lane: the first rank reads the prompts"),
    ("--dataset-provider digit", "--dataset-provider digit: unknown; built in are arithmetic, conversations, digits"),
    ("--dataset-provider digits", "--digits-text-only-fraction 0.3: the model takes no images; set it to 1"),
    ("--vocab-size 99", "the tokenizer of characters has token ids up to 99, the model's --vocab-size is 99"),
    ("--reward nothing", "--reward nothing: unknown"),
])
def test_contradictions_and_missing_files_are_refused_by_name(flags, expected):
    with pytest.raises(ValueError, match=expected):
        validate_rl(parsed(*flags.split()), 1)


@pytest.mark.parametrize(("ranks", "flags", "works", "fails", "message"), [
    (2, "--llm-tp 2 --max-tokens-per-microbatch 129", "", "--sequence-parallel",
     "--max-tokens-per-microbatch 129 is not divisible by --llm-tp 2, which --sequence-parallel needs; nearest are 128 "
     "and 130"),
    (2, "--llm-cp 2 --max-tokens-per-microbatch", "68", "66",
     "--max-tokens-per-microbatch 66 is not divisible by 4, twice --llm-cp 2 times --llm-tp 1; nearest are 64 and 68"),
    (2, "--llm-tp 2 --sequence-parallel --fp8-format hybrid", "--seq-length 68", "--max-tokens-per-microbatch 136",
     "--max-tokens-per-microbatch 136 over 2 ranks is not a multiple"),
    (8, "--llm-dp 8 --updates-per-rollout", "2", "4",
     "--updates-per-rollout 4: 4 completions of an update do not divide over --llm-dp 8"),
])
def test_tokens_and_completions_divide_over_the_ranks_that_share_them(ranks, flags, works, fails, message):
    validate_rl(parsed(*flags.split(), *works.split()), ranks)
    with pytest.raises(ValueError, match=message):
        validate_rl(parsed(*flags.split(), *fails.split()), ranks)


def test_a_model_without_its_encoder_is_refused():
    with pytest.raises(ValueError, match="--llm-only: the rollout engine has the encoder vision of"):
        validate_rl(parse_as(RlRunConfig, """--model-provider mock --device cpu --transformer-impl local --train-iters 1
            --llm-only --global-batch-size 8 --max-completion-tokens 16""".split(), DESCRIPTION), 1)


def test_only_the_first_rank_opens_the_prompts():
    config = parsed("--tokenizer", "nowhere")
    validate_rl(config, 1, rank=1)
    with pytest.raises(ValueError, match="--tokenizer nowhere"):
        validate_rl(config, 1, rank=0)


def test_the_engine_samples_from_what_it_reports(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    config = parsed("--engine-tp", "2", "--engine-pp", "2", "--engine-ep", "--engine-max-num-seqs", "7", "--seed", "5")
    options = engine_options(config, Path("folder"))
    assert (options.model, options.dtype, options.num_workers, options.enable_expert_parallel) == (
        "folder", "float32", 4, True)
    assert (options.max_model_len, options.max_num_seqs, options.seed, options.load_format) == (64, 7, 5, "dummy")
    assert options.extra["logprobs_mode"] == "processed_logprobs"
    assert options.environment["HF_HUB_OFFLINE"] == "0"
    assert refit_options(parsed("--bf16")).dtype == "bfloat16"
    assert (options.data_parallel_size, options.data_parallel_rank) == (1, 0)
    shared = engine_options(parsed("--engine-dp", "3", "--engine-share-experts"), Path("folder"), 2)
    assert (shared.data_parallel_size, shared.data_parallel_rank) == (3, 2)
    assert engine_options(parsed("--seed", str(2**32)), Path("folder"), 2).seed == 2, "vLLM could not seed NumPy"


def test_an_engine_is_none_of_the_launchers_workers(monkeypatch):
    before = signal.getsignal(signal.SIGINT)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_TOKEN_PATH", "kept")
    try:
        leave_launcher()
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert "RANK" not in os.environ and "TORCHELASTIC_USE_AGENT_STORE" not in os.environ
    assert "MASTER_ADDR" not in os.environ and os.environ["HF_TOKEN_PATH"] == "kept"


def test_routers_keep_their_expert_bias_unless_a_rate_is_given(tmp_path):
    def rate(*flags: str, run_type: type[RunConfig] = RlRunConfig) -> float:
        config = parse_as(run_type, ["--model-provider", "nemotron_h", *flags], "")
        return config.model_family.moe_router_bias_update_rate

    assert rate() == 0 and rate(run_type=RunConfig) == 1e-3
    assert rate("--moe-router-bias-update-rate", "1e-3") == 1e-3
    (tmp_path / "rate.toml").write_text("moe-router-bias-update-rate = 0.002")
    assert rate("--config", str(tmp_path / "rate.toml")) == 0.002
    parsed()  # a family without the flag


def test_multi_token_prediction_gets_no_gradient_and_is_refused(tmp_path):
    """Its layers may be those of a flag, or of a config.json, beside which the flags say nothing of them."""
    config = parse_as(RlRunConfig, [*HYBRID, "--hybrid-layer-pattern", "M*/*"], DESCRIPTION)
    with pytest.raises(ValueError, match=r"--hybrid-layer-pattern M\*/\* has layers of multi-token prediction .*; use "
                       r"--hybrid-layer-pattern M\*$"):
        validate_rl(config, 1)
    sizes = registry.model_provider("nemotron_h").hf_config(config.model_family)
    for depths, refused in ((1, True), (0, False)):
        (tmp_path / "config.json").write_text(json.dumps(sizes | {"num_nextn_predict_layers": depths}))
        config = parse_as(RlRunConfig, [*HYBRID, "--hf-config", str(tmp_path)], DESCRIPTION)
        with pytest.raises(ValueError, match="has num_nextn_predict_layers 1, layers of multi-token prediction") if (
                refused) else contextlib.nullcontext():
            validate_rl(config, 1)


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
    ({"top_k": 3, "importance_correction": "icepop"}, "^--top-k 3 with --importance-correction icepop: .* set "
     "--importance-low below"),
    ({"top_k": 3, "importance_correction": "sequence"}, "^--top-k 3 with --importance-correction sequence: .* set "
     "--importance-low below"),
    ({"ref_load": "x"}, "^--ref-load x with --kl-coeff 0, which needs no reference policy"),
    ({"ref_load_hf": "x"}, "^--ref-load-hf x with --kl-coeff 0"),
    ({"ref_load": "x", "ref_load_hf": "y", "kl_coeff": 0.1}, "^--ref-load x and --ref-load-hf y: the reference policy"),
    ({"kl_type": "k1"}, "^--kl-type k1 with --kl-coeff 0, which estimates no KL divergence: set --kl-coeff"),
    ({"kl_in": "reward"}, "^--kl-in reward with --kl-coeff 0, which estimates no KL divergence: set --kl-coeff"),
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
    ({"importance_cap": 3.0, "importance_correction": "icepop"}, "--importance-cap 3.0 is for .* token, not for icep"),
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


def test_bands_of_the_corrections():
    assert config(importance_correction="icepop").importance_band == (0.5, 5.0)
    assert config(importance_correction="sequence").importance_band == (0.999, 1.002)
    assert config(importance_correction="sequence", importance_low=0.9).importance_band == (0.9, 1.002)


def test_a_policy_may_start_from_the_language_model_of_a_megatron_checkpoint():
    flags = [*HYBRID, "--hybrid-layer-pattern", "M*", "--load-nemotron-checkpoint", "saved"]
    config = parse_as(RlRunConfig, flags, DESCRIPTION)
    assert validate_rl(config, 1).world_size == 1
    source = registry.model_provider("nemotron_h").megatron_source(config.model_family)
    assert (source.path, source.flag, set(source.prefixes)) == ("saved", "--load-nemotron-checkpoint", {"language"})
