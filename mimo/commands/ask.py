"""`mimo ask`: the answer of a trained model to a question about images."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mimo import registry
from mimo.checkpoint.load import load_weights
from mimo.checkpoint.reader import read_common
from mimo.checkpoint.state import RunState
from mimo.commands.convert import check_hf_config, config_of_checkpoint, tensor_bar
from mimo.commands.flags import AskFlags, checkpoint_folder, is_hf_model, provider_name, takes_hf_config
from mimo.config.cli import parse
from mimo.config.trainer import LayoutConfig, ModelConfig, RunConfig
from mimo.config.validate import validate_without_data
from mimo.data.loader import StepLoader
from mimo.data.sources import GivenSource
from mimo.grid.groups import Grids
from mimo.grid.lanes import check_engine_tiles, data_request, needs_of
from mimo.grid.spec import Layout
from mimo.model.build import params_dtype, set_training
from mimo.platform.base import Platform
from mimo.protocols import (
    LANGUAGE,
    ImageDataProvider,
    ImageProcessorProvider,
    ModelProvider,
    Question,
    QuestionDataProvider,
    SizesProvider,
)
from mimo.rl.launch_engine import has_processor
from mimo.rl.placement import check_cpu_engine
from mimo.training.evaluate import next_tokens
from mimo.training.setup import setup_trainer
from mimo.watchdog.watchdog import open_watchdog
from mimo.weights.configuration import CONFIG_JSON, read_config_json
from mimo.weights.export import ExportOptions, export_checkpoint
from mimo.weights.load import HfPaths, load_hf
from mimo.weights.safetensors_io import INDEX, HfSource

# Group that a single process forms with itself.
GROUP_TIMEOUT_S = 600.0
# Longest question, before its length is known.
MAX_QUESTION_TOKENS = 1 << 20
# Memory of the engine's cache on a CPU. On a GPU, the engine fills a fraction of the memory.
CPU_CACHE_BYTES = 256 << 20
# Fields of `ModelConfig` that do not change an answer.
WITHOUT_EFFECT = ("freeze", "cuda_graphs", "moe_static_rows", "fp8_primary_weights", "moe_token_dispatcher_type",
                  "recompute", "recompute_modules", "recompute_num_layers", "encoder_recompute",
                  "encoder_recompute_modules")


@dataclass(frozen=True)
class Asked:
    """A model and a question for it.

    The model is in the folder of a checkpoint, or in a Hugging Face folder. `config` also has the data set whose prompt
    format the question has.
    """

    config: RunConfig
    folder: Path
    is_hf: bool
    provider: ModelProvider
    question: Question
    max_tokens: int

    @property
    def length(self) -> int:
        """Tokens of the question, those of its images included."""
        sample, family = self.question.sample, self.config.model_family
        encoder = next(iter(self.provider.encoders(family)), "")
        return len(sample.tokens) + sum(
            self.provider.num_image_tokens(family, encoder, size[0], size[1]) - 1 for size in sample.image_sizes)


def ask(flags: AskFlags, run_flags: Sequence[str], platform: Platform) -> int:
    """Print the answer.

    Raises:
        ValueError: no checkpoint, an image that cannot be read, or a model that cannot be asked; the message says why.
    """
    is_hf = is_hf_model(Path(flags.checkpoint))
    if is_hf:
        folder, config = Path(flags.checkpoint), _config_of_hf(Path(flags.checkpoint), run_flags)
    else:
        folder = checkpoint_folder(flags.checkpoint, flags.ckpt_step, "mimo ask")
        config = _config_of_checkpoint(read_common(folder), folder, run_flags)
        check_hf_config(config, folder)
    provider = registry.model_provider(config.model.model_provider)
    dataset = config.find_dataset(config.data.dataset_provider)
    config = _for_one_process(config, platform, flags.max_tokens)
    layout = validate_without_data(config, 1)
    # A frozen module has neither gradients nor optimizer state. A run that trains nothing is refused, so this is late.
    parts = [grid.name for grid in layout.encoders] + (["projector"] if layout.encoders else []) + [LANGUAGE]
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, freeze=",".join(parts)))
    *names, text = flags.words
    images = [(name, Path(name).read_bytes()) for name in names]
    if images and not layout.encoders:
        raise ValueError(f"{names[0]}: the model {config.model.model_provider} of {folder} takes no images")
    assert isinstance(dataset, QuestionDataProvider), "checked with the configuration"
    request = data_request(layout, provider, config.model_family, micro_batch_size=1, seq_length=MAX_QUESTION_TOKENS,
                           seed=0, split="valid")
    question = dataset.question(config.dataset, request, text, images, thinks=flags.think)
    asked = Asked(config, folder, is_hf, provider, question, flags.max_tokens)
    engine = _engine(flags.engine, asked)
    print(f"{folder}: answered by {'vLLM' if engine == 'vllm' else 'the trainer'} on {platform.name}",
          file=sys.stderr, flush=True)
    if engine == "vllm":
        print("starting vLLM, which may take minutes; --engine trainer starts sooner", file=sys.stderr, flush=True)
    tokens = _ask_vllm(asked, platform) if engine == "vllm" else _ask_trainer(asked, layout, platform)
    print(dataset.decode(config.dataset, [token for token in tokens if token not in question.end_token_ids]))
    return 0


# The model and its data set.


def _config_of_hf(folder: Path, run_flags: Sequence[str]) -> RunConfig:
    """Return the configuration of a Hugging Face folder, whose tokenizer and image processor are the data's."""
    name = provider_name(None, folder)
    if not takes_hf_config(registry.model_provider(name)):
        raise ValueError(f"{folder}: --model-provider {name} takes its sizes from flags; ask a checkpoint of it")
    values = read_config_json(folder) or {}
    dtype = values.get("dtype") or values.get("torch_dtype")
    words = ["--model-provider", name, "--hf-config", str(folder), "--load-hf", str(folder), "--dataset-provider",
             "conversations", *(["--no-bf16"] if dtype == "float32" else [])]
    config = parse([*words, *run_flags])
    if not isinstance(config.find_dataset(config.data.dataset_provider), QuestionDataProvider):
        raise ValueError(f"--dataset-provider {config.data.dataset_provider} does not say how a question is written; "
                         "leave it out, or give --dataset-provider conversations")
    return config


def _config_of_checkpoint(common: Mapping[str, Any], folder: Path, run_flags: Sequence[str]) -> RunConfig:
    """Return the configuration of a checkpoint. Raises ValueError if its data set has no prompts of a user's."""
    if "config" not in common or "grids" not in common:
        raise ValueError(f"{folder}: common.pt is not that of a checkpoint of this trainer")
    config = config_of_checkpoint(common, folder, run_flags)
    has_format = config.dataset is not None and isinstance(
        config.find_dataset(config.data.dataset_provider), QuestionDataProvider)
    if not has_format:
        trained = f"--dataset-provider {config.data.dataset_provider}" if config.dataset is not None else "other data"
        raise ValueError(f"{folder} was trained on {trained}, which does not say how a question is written; give "
                         "-- --dataset-provider conversations --tokenizer FOLDER at the end of the command")
    return dataclasses.replace(config, layout=dataclasses.replace(config.layout, llm_only=LANGUAGE in common["grids"]
                                                                  and len(common["grids"]) == 1))


def _for_one_process(config: RunConfig, platform: Platform, max_tokens: int) -> RunConfig:
    """Return the configuration for one process, whatever the layout of the run was."""
    # Other ways to launch kernels, to exchange tokens, to keep weights and to recompute activations give the same
    # answer, and some are refused in one process or with the layers of a CPU.
    model = dataclasses.replace(config.model, **{name: vars(ModelConfig())[name] for name in WITHOUT_EFFECT})
    if platform.name == "cpu" and model.transformer_impl == "transformer_engine":
        model = dataclasses.replace(model, transformer_impl="local")
    is_text = config.layout.llm_only or not registry.model_provider(model.model_provider).encoders(config.model_family)
    # Kinds of layouts differ in the place of the encoder, and without one they are refused.
    layout = LayoutConfig(layout="disjoint" if is_text else "homogeneous", llm_only=config.layout.llm_only)
    # The length of the question is not known yet, and is checked when it is. Models with an encoder need room for an
    # image, whether or not the question has one.
    seq_length = max(max_tokens, 0 if is_text else _fixed_image_tokens(config) + 1)
    train = dataclasses.replace(config.train, device=platform.name, micro_batch_size=1, global_batch_size=1,
                                train_iters=1, seq_length=seq_length)
    return dataclasses.replace(config, layout=layout, model=model, train=train)


def _fixed_image_tokens(config: RunConfig) -> int:
    """Return the tokens of an image if the encoder takes images of one size; 0 if it takes any size.

    Raises:
        ValueError: sizes that fit no layout.
    """
    provider, family = registry.model_provider(config.model.model_provider), config.model_family
    if isinstance(provider, SizesProvider):
        provider.validate_sizes(family)
    spec = provider.token_spec(family)
    encoder = next(iter(provider.encoders(family)))
    return provider.num_image_tokens(family, encoder, *spec.image_shape) if spec.image_size else 0


def _engine(wanted: str, asked: Asked) -> str:
    """Return the engine that answers, `vllm` or `trainer`. Raises ValueError if the wanted one cannot."""
    family = asked.config.model_family
    problem = "" if importlib.util.find_spec("vllm") else "vLLM is not installed"
    try:
        described = asked.provider.hf_config(family)
        if asked.config.train.device == "cpu":
            check_cpu_engine(asked.config.model.model_provider, described)
        if asked.provider.encoders(family) and not asked.config.layout.llm_only:
            if not isinstance(asked.provider, ImageProcessorProvider):
                problem = problem or f"{asked.config.model.model_provider} has no image processor for vLLM"
            else:
                asked.provider.check_processor(family)
                if asked.question.originals:
                    check_engine_tiles(asked.config, asked.provider)
    except ValueError as error:
        problem = problem or str(error)
    if wanted == "vllm" and problem:
        raise ValueError(f"--engine vllm: {problem}; --engine trainer answers without vLLM")
    return "trainer" if problem or wanted == "trainer" else "vllm"


# The trainer's own model: the likeliest token each time, by a forward pass over the whole sequence.


def _ask_trainer(asked: Asked, layout: Layout, platform: Platform) -> list[int]:
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "0")
    platform.set_device(0)
    platform.init_process_group(0, 1, GROUP_TIMEOUT_S)
    try:
        with Grids(layout, platform.backend) as grids:
            return _generate(asked, grids, platform)
    finally:
        dist.destroy_process_group()


def _check_length(asked: Asked, layout: Layout) -> None:
    """Raise ValueError if the model has no room for the question and the answer."""
    length, count = asked.length, asked.max_tokens
    try:
        # A question without images may be shorter than an image, for which providers want room in any case.
        asked.provider.validate(asked.config.model_family, layout, max(length + count, asked.config.train.seq_length))
    except ValueError as error:
        raise ValueError(f"a question of {length} tokens with --max-tokens {count}: {error}") from error


def _generate(asked: Asked, grids: Grids, platform: Platform) -> list[int]:
    """Return the tokens of the answer, without the one that ends it."""
    provider, family, sample, length = asked.provider, asked.config.model_family, asked.question.sample, asked.length
    seq_length = length + asked.max_tokens
    config = dataclasses.replace(asked.config, train=dataclasses.replace(asked.config.train, seq_length=seq_length))
    _check_length(asked, grids.layout)
    watchdog = open_watchdog(0, grids, tempfile.gettempdir())
    try:
        parts = setup_trainer(config, provider, grids, platform, watchdog)
        if asked.is_hf:
            load_hf(parts.built, grids, provider, family, HfPaths(str(asked.folder)), frozenset())
        else:
            state = RunState(config, grids, platform, parts.built, parts.optimizer, parts.scheduler)
            load_weights(state, asked.folder, watchdog, "mimo ask")
        source = GivenSource([[sample]], needs_of(grids.layout, 0, 1), "the question")
        loader = StepLoader(grids.layout, 0, source, model_provider=provider, model_config=family, micro_batch_size=1,
                            num_microbatches=1, seq_length=seq_length, dtype=params_dtype(config), prefetch=False)
        (batch,) = loader.next_step()
        assert batch.text is not None, "the only rank holds the language model"
        set_training(parts.built.model, False)
        answer: list[int] = []
        with torch.no_grad():
            while len(answer) < asked.max_tokens:
                place = length + len(answer)
                token = int(next_tokens(parts, [batch])[0][0, place - 1])
                if token in asked.question.end_token_ids:
                    break
                answer.append(token)
                batch.text.input_ids[0, place] = token
        return answer
    finally:
        watchdog.close(failed=False)


# vLLM, in this process.


def _ask_vllm(asked: Asked, platform: Platform) -> list[int]:
    # The engine's own log has hundreds of lines, and it looks nothing up on a hub.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if platform.name == "cpu":
        os.environ.setdefault("VLLM_CPU_CI_ENV", "1")
    from mimo.rollout.engine import EngineOptions, RolloutEngine, Sampling

    sample = asked.question.sample
    prompt: dict[str, Any] = {"prompt_token_ids": sample.tokens.tolist()}
    if sample.images:
        prompt["multi_modal_data"] = {"image": _pictures(asked)}
    with tempfile.TemporaryDirectory(prefix="mimo-ask-") as scratch:
        folder = _folder_for_vllm(asked, Path(scratch) / "model")
        arguments: dict[str, Any] = {"skip_tokenizer_init": not has_processor(folder), "enforce_eager": True}
        if platform.name == "cpu":
            arguments["kv_cache_memory_bytes"] = CPU_CACHE_BYTES
        engine = RolloutEngine(EngineOptions(
            str(folder), "bfloat16" if asked.config.model.bf16 else "float32", load_format="auto", max_num_seqs=1,
            max_model_len=asked.length + asked.max_tokens, extra=arguments))
        # The end token of config.json may be its architecture's default, and no end in this tokenizer.
        sampling = Sampling(asked.max_tokens, temperature=0.0, stop_token_ids=asked.question.end_token_ids,
                            ignore_eos=True)
        ((rollout,),) = engine.generate([prompt], sampling)
    return list(rollout.token_ids)


def _pictures(asked: Asked) -> list[Any]:
    """Return the images in 8 bits and of the size that the encoder takes, which vLLM only normalises.

    vLLM cuts the images of a model that takes tiles itself, so those are whole.
    """
    from PIL import Image

    sample, originals = asked.question.sample, asked.question.originals
    if originals is not None:
        return [Image.fromarray(picture) for picture in originals]
    levels = sample.images or []
    if sample.normalisation is None:
        mean, std = (np.array(values, np.float32)[:, None, None] for values in _normalisation(asked))
        levels = [np.rint((image * std + mean) * 255).clip(0, 255).astype(np.uint8) for image in levels]
    return [Image.fromarray(image.transpose(1, 2, 0)) for image in levels]


def _normalisation(asked: Asked) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of each channel."""
    tokens = asked.provider.token_spec(asked.config.model_family)
    dataset = asked.config.find_dataset(asked.config.data.dataset_provider)
    if not asked.question.sample.images or not isinstance(dataset, ImageDataProvider):
        return (0.5,) * tokens.num_channels, (0.5,) * tokens.num_channels
    chosen = dataset.image_processing(asked.config.dataset, tokens)
    mean, std = ((*values,) * tokens.num_channels if len(values) == 1 else tuple(values)
                 for values in (chosen.mean, chosen.std))
    return mean, std


def _folder_for_vllm(asked: Asked, folder: Path) -> Path:
    """Write a folder with the weights, and a processor that leaves images as large as they are or cuts their tiles."""
    provider, family = asked.provider, asked.config.model_family
    if asked.is_hf:
        folder.mkdir()
        (folder / CONFIG_JSON).write_bytes((asked.folder / CONFIG_JSON).read_bytes())
        # Only the files that the trainer reads. vLLM would prefer Mistral's own consolidated.safetensors beside them.
        for name in [*HfSource(asked.folder).catalog.file_bytes, INDEX]:
            if (asked.folder / name).is_file():
                (folder / name).symlink_to((asked.folder / name).resolve())
    else:
        with tensor_bar("exporting") as progress:
            export_checkpoint(asked.folder, folder, provider, family, ExportOptions(), progress)
        (folder / CONFIG_JSON).write_text(json.dumps(provider.hf_config(family)), encoding="utf-8")
    if provider.encoders(family) and not asked.config.layout.llm_only:
        assert isinstance(provider, ImageProcessorProvider), "checked with the engine"
        provider.write_processor(family, folder, *_normalisation(asked))
    return folder
