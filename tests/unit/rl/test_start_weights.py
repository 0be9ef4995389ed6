"""The sources from which a policy may take its weights."""

from __future__ import annotations

from mimo.config.cli import parse_as
from mimo.config.rl_run import DESCRIPTION, RlRunConfig, validate_rl
from mimo.registry import model_provider

FLAGS = """--model-provider nemotron_h --hidden-size 64 --num-attention-heads 2 --ffn-hidden-size 64 --vocab-size 100
--kv-channels 32 --num-query-groups 1 --mamba-num-heads 4 --mamba-head-dim 8 --mamba-num-groups 2 --no-bf16 --device cpu
--transformer-impl local --seq-length 64 --max-completion-tokens 16 --max-tokens-per-microbatch 128
--global-batch-size 16 --completions-per-prompt 4 --train-iters 3 --hybrid-layer-pattern M*""".split()


def test_a_policy_may_start_from_the_language_model_of_a_megatron_checkpoint() -> None:
    config = parse_as(RlRunConfig, [*FLAGS, "--load-nemotron-checkpoint", "saved"], DESCRIPTION)
    assert validate_rl(config, 1).world_size == 1
    source = model_provider("nemotron_h").megatron_source(config.model_family)
    assert (source.path, source.flag, set(source.prefixes)) == ("saved", "--load-nemotron-checkpoint", {"language"})
