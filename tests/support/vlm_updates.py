"""Policy updates of a small model on made-up completions of prompts with images; inside a worker process."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from mimo.config.cli import parse_as
from mimo.config.rl import RlConfig
from mimo.config.rl_run import RlRunConfig
from mimo.config.validate import validate
from mimo.grid.spec import GridSpec, Layout
from mimo.protocols import LANGUAGE, ImageSize, Sample, VideoSize
from mimo.rl.images import ImageTokens, needs_pixels
from mimo.rl.losses import advantages
from mimo.rl.policy import PolicyTrainer
from mimo.rl.rollouts import Completion
from tests.support import equality, policy_updates
from tests.support.global_state import Piece, read_gradients, read_parameters
from tests.support.picture_prompts import IMAGE_TOKEN, PROMPTS, SIDE, SIZES, VIDEO_TOKEN, PictureSet

VOCAB_SIZE, TOKENS_OF_IMAGE = 61, 4
FLAGS = f"""--dataset-provider digits --device cpu --no-bf16 --transformer-impl local
--global-batch-size 8 --train-iters 1 --lr-decay-style constant --lr 1e-2 --adam-eps 1e-4 --num-generations 0
--watchdog-timeout-s 60 --hidden-size 32 --num-attention-heads 4 --num-query-groups 2
--ffn-hidden-size 48 --vocab-size {VOCAB_SIZE} --make-vocab-size-divisible-by 64 --image-token-id {IMAGE_TOKEN}
--vision-hidden-size 32 --vision-num-attention-heads 4 --vision-ffn-hidden-size 48""".split()
QWEN_TOKENS = f"--video-token-id {VIDEO_TOKEN} --vision-start-token-id 58 --vision-end-token-id 57".split()
# Qwen3-VL has levels of DeepStack for layers of both pipeline stages.
FAMILIES = {
    "qwen2_5_vl": [*"""--num-layers 4 --mrope-section 2 1 1 --vision-num-layers 4 --vision-patch-size 4
        --vision-window-size 8 --vision-full-attention-layers 1 3 --vision-tokens-per-second 3""".split(),
                   *QWEN_TOKENS],
    "llava": f"--num-layers 2 --vision-num-layers 2 --vision-image-size {SIDE} --vision-patch-size 8".split(),
    "qwen3_vl": [*"""--num-layers 4 --kv-channels 16 --mrope-section 4 2 2 --vision-num-layers 4 --vision-patch-size 4
        --vision-num-position-embeddings 36 --vision-deepstack-layers 0 1 3""".split(), *QWEN_TOKENS],
    # Without its balancing loss, which depends on the division into microbatches.
    "nemotron-moe-vlm-tiny": """--hybrid-layer-pattern M*-E --moe-aux-loss-coeff 0 --vision-patch-size 4
        --vision-max-image-size 64""".split(),
}
LENGTHS = (9, 4, 1, 12, 6, 15, 3, 7)
# Frames of videos in turn; a placeholder of Qwen3-VL stands for two.
FRAMES = {"qwen2_5_vl": (6, 2), "qwen3_vl": (2,)}
NUM_UPDATES = 2


@dataclass
class Outcome(policy_updates.Outcome):
    """Results on a rank.

    Attributes:
        gradients: gradients of the first update, normalised, before clipping.
        pixels: prompts whose pictures were drawn, by update.
    """

    gradients: list[Piece] = field(default_factory=list)
    pixels: list[list[int]] = field(default_factory=list)


def pictures(family: str = "llava", shift: int = 0) -> PictureSet:
    """Return prompts with images of the sizes that a family takes, and with videos if it takes any."""
    return PictureSet(((SIDE, SIDE),) if family == "llava" else SIZES, shift=shift, frames=FRAMES.get(family, ()))


def num_image_tokens(size: ImageSize, family: str) -> int:
    """Count the tokens of an image, or of two frames each of a video."""
    pictures = size.frames // 2 if isinstance(size, VideoSize) else 1
    return TOKENS_OF_IMAGE if family == "llava" else pictures * size[0] * size[1] // 64


def completions(step: int, family: str = "llava") -> list[Completion]:
    """Return two completions of each prompt, with log-probs near an untrained model's.

    Some have the tokens of images and videos, which are words there.
    """
    generator, prompts, found = torch.Generator().manual_seed(step), pictures(family), []
    for number, length in enumerate(LENGTHS):
        ids = torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist()
        if number % 3 == 0:
            ids[length // 2] = IMAGE_TOKEN if number else VIDEO_TOKEN
        log_probs = (-math.log(VOCAB_SIZE) - 0.5 * torch.rand(length, generator=generator)).tolist()
        reward, index = torch.rand((), generator=generator).item(), step * len(PROMPTS) + number // 2
        prompt = prompts.prompt(index)
        found.append(Completion(
            f"{prompt.key}#{number % 2}", number // 2, prompt.token_ids, tuple(ids), tuple(log_probs), "length", reward,
            index, prompt.image_sizes, sum(num_image_tokens(size, family) for size in prompt.image_sizes)))
    return found


def parsed(config: RlConfig, flags: tuple[str, ...], family: str = "llava") -> RlRunConfig:
    """Return a run of the small model of a family."""
    budget = str(config.max_tokens_per_microbatch)
    return parse_as(RlRunConfig, ["--model-provider", family, *FLAGS, *FAMILIES[family], "--seq-length", budget,
                                  "--max-tokens-per-microbatch", budget, *flags], "")


def update(rank: int, flags: tuple[str, ...], world_size: int, config: RlConfig, shift: int = 0,
           family: str = "llava") -> Outcome:
    """Take steps on this rank of a layout.

    Args:
        rank: this process.
        flags: flags of the layout and of what is frozen.
        world_size: number of processes.
        config: the algorithm.
        shift: shift of the prompts that encoder ranks see.
        family: the model.
    """
    from mimo.registry import model_provider

    run = parsed(config, flags, family)
    layout = validate(run, world_size)
    with equality.open_trainer(run, layout) as parts:
        images = ImageTokens.of(model_provider(family), run.model_family, layout)
        prompts = pictures(family, shift)
        trainer = PolicyTrainer(parts, config, VOCAB_SIZE, 0, images, prompts if needs_pixels(layout, rank) else None)
        outcome = Outcome()
        equality.note_gradients(parts, outcome)
        try:
            for step in range(NUM_UPDATES):
                outcome.results.append(trainer.update(completions(step, family)))
                outcome.pixels.append(sorted(prompts.drawn))
                prompts.drawn.clear()
        except ValueError as error:
            outcome.error = str(error)
        outcome.after = read_parameters(parts.built.model)
    return outcome


def plain(rank: int, config: RlConfig, family: str = "llava") -> tuple[float, list[Piece]]:
    """Loss of the first update and its gradients: a sequence at a time, no packing, no schedule, autograd alone.

    Sequences go through the collation of supervised training, which knows nothing of completions.

    Args:
        rank: this process, the only one.
        config: the algorithm, with `ppo`, `token-mean`, `grpo` and `--importance-correction token`.
        family: the model.
    """
    from mimo.registry import model_provider

    run = parsed(config, ("--layout", "colocated", "--no-use-distributed-optimizer"), family)
    with equality.open_trainer(run, Layout("colocated", 1, (GridSpec("vision"),), GridSpec(LANGUAGE))) as parts:
        model = equality._unwrapped(parts.built.model)
        images = ImageTokens.of(model_provider(family), run.model_family, parts.grids.layout)
        own = completions(0, family)
        scores = advantages([each.reward for each in own], [each.prompt for each in own], config.advantage)
        num_tokens, total = sum(LENGTHS), torch.zeros(())
        for each, score in zip(own, scores, strict=True):
            logits, ids = _forward(model, images, each, family)
            log_p = (logits / config.temperature).log_softmax(-1)
            # Position before each sampled token.
            places = torch.arange(each.prompt_length - 1, each.length - 1)
            policy = log_p[places, ids[places + 1]]
            weights = (policy.detach() - torch.tensor(each.logprobs)).exp().clamp(max=config.importance_cap)
            entropy = -(log_p[places].exp() * log_p[places]).sum(-1)
            loss = -(weights * score * (policy - policy.detach()).exp()).sum() - config.entropy_coeff * entropy.sum()
            (loss / num_tokens).backward()
            total = total + loss.detach() / num_tokens
        for parameter in model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = read_gradients(model)
    return total.item(), gradients


def _forward(model: Any, images: ImageTokens, completion: Completion, family: str) -> (
        tuple[torch.Tensor, torch.Tensor]):
    """Logits `[t, vocab]` and token ids `[t]` of a whole sequence."""
    from mimo.data.batch import Microbatch
    from mimo.data.collate import collate_encoder, collate_text

    prompts = pictures(family)
    prompt = prompts.prompt(completion.index)
    # A sampled image token is a word among words: it is put where it belongs after images have been.
    words = [0 if token in (IMAGE_TOKEN, VIDEO_TOKEN) else token for token in completion.token_ids]
    tokens = np.array([*prompt.token_ids, *words])
    sample = Sample(completion.key, tokens, np.arange(len(tokens)) >= len(prompt.token_ids), list(prompt.image_sizes),
                    [prompts.normalisation.apply(picture) for picture in prompt.pictures()])
    text = collate_text([sample], images=images, seq_length=completion.length, vocab_size=VOCAB_SIZE, pad_token_id=0)
    text = replace(text, input_ids=text.input_ids.clone())
    text.input_ids[0, completion.prompt_length:] = torch.tensor(completion.token_ids)
    encoder = collate_encoder([sample], module="vision", images=images, lane_sizes=[1], dtype=torch.float32)
    for bridge in model.colocated_comms.values():
        bridge.begin_step([[sum(encoder.token_counts)]], [[sum(text.token_counts["vision"])]])
    logits = model(Microbatch(text, {"vision": encoder}), with_labels=False)
    return logits[0, :, :VOCAB_SIZE], text.input_ids[0]
