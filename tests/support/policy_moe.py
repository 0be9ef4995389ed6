"""Policy updates that only load balancing moves: every completion has the same reward; inside a worker process."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import torch

from mimo.config.rl import RlConfig
from mimo.rl.policy import PolicyTrainer
from mimo.rl.rollouts import Completion
from tests.support import policy_updates
from tests.support.global_state import read_parameters
from tests.support.policy_updates import completions, open_trainer

# Its second layer has experts, whose routers have a bias.
FLAGS = """--model-provider deepseek_v3 --dataset-provider mock --device cpu --no-bf16 --transformer-impl local
--global-batch-size 8 --micro-batch-size 1 --train-iters 1 --lr-decay-style constant --num-generations 0
--watchdog-timeout-s 60 --num-layers 2 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 48 --vocab-size 93
--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 16 --moe-shared-expert-intermediate-size 16 --kv-lora-rank 16
--q-lora-rank 24 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 12 --moe-router-num-groups 1
--moe-router-group-topk 1 --first-k-dense-replace 1 --rope-type rope --moe-router-load-balancing-type aux_loss
--moe-aux-loss-coeff 1e-3 --adam-eps 1e-6 --lr 1e-2 --weight-decay 0""".split()


@dataclass
class Outcome(policy_updates.Outcome):
    """Results on a rank, with the expert bias of each of its routers after the update, by layer."""

    biases: dict[int, torch.Tensor] = field(default_factory=dict)


def update(rank: int, flags: tuple[str, ...], world_size: int, config: RlConfig, alike: bool = False) -> Outcome:
    """Take one update on this rank of a layout.

    Args:
        rank: this process.
        flags: flags of the model and the layout.
        world_size: number of processes.
        config: the algorithm.
        alike: all completions have the same tokens.
    """
    from megatron.core.transformer.moe.router import TopKRouter

    with open_trainer(flags, world_size, config, FLAGS) as parts:
        found = [dataclasses.replace(each, reward=1.0) for each in completions(0)]
        if alike:
            found = [_as(each, found[0]) for each in found]
        outcome = Outcome(results=[PolicyTrainer(parts, config, 93, pad_token_id=0).update(found)])
        outcome.after = read_parameters(parts.built.model)
        outcome.biases = {part.layer_number: part.expert_bias.clone() for part in parts.built.model.modules()
                          if isinstance(part, TopKRouter)}
    return outcome


def _as(each: Completion, model: Completion) -> Completion:
    return dataclasses.replace(model, key=each.key, prompt=each.prompt)
