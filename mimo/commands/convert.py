"""`mimo export`: a checkpoint's weights as a Hugging Face folder."""

from __future__ import annotations

import dataclasses
import shlex
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

from mimo import registry
from mimo.checkpoint.differences import model_differences, refused, sections_of
from mimo.checkpoint.reader import read_common, require_checksums
from mimo.commands.flags import (
    ExportFlags,
    ImportFlags,
    checkpoint_folder,
    pretrained_folder,
    provider_name,
    takes_hf_config,
)
from mimo.config import toml_file
from mimo.config.cli import config_files, parse, to_toml, typed_providers
from mimo.config.trainer import RunConfig
from mimo.config.validate import check_allowed_differences
from mimo.protocols import (
    LANGUAGE,
    ImageDataProvider,
    ImageProcessingProvider,
    ModelProvider,
    SizesProvider,
    VideoDataProvider,
    VideoProcessingProvider,
)
from mimo.text import counted, format_bytes, parse_bytes
from mimo.weights import hub
from mimo.weights.configuration import CONFIG_JSON, read_config_json
from mimo.weights.export import WEIGHT_DTYPES, ExportOptions, export_checkpoint
from mimo.weights.import_checkpoint import import_hf
from mimo.weights.safetensors_io import INDEX, Progress, weight_files

# Which model a checkpoint or a Hugging Face folder is of.


def config_of_checkpoint(common: Mapping[str, Any], folder: Path, run_flags: Sequence[str]) -> RunConfig:
    """Return the model that a checkpoint holds, as the configuration of a run.

    Its sizes are those that the checkpoint stores; where it is of an older version, those of the flags that it was
    saved with. The data set is that of the run, and None where its provider is not built in and was not typed, or is
    one of train_rl.py. Everything else that a run has stays at its defaults. `run_flags` replace its own.

    Raises:
        ValueError: it names a provider that is not built in or not there, has unknown flags, or there is none; flags
            make another model of it.
    """
    sections = sections_of(common["config"])
    if not sections:
        raise ValueError(f"{folder} says nothing about the model it holds: it was not made by `mimo import`")
    data, typed = sections.get("data", {}).get("dataset-provider"), typed_providers(run_flags)
    wanted = typed["dataset_provider"] or (data if data in registry.DATASET_PROVIDERS else None)
    has_data = data is not None and data == wanted and ("rl" not in sections or _has_prompts_of_same_flags(data))
    titles = ("model", "model-family", *(("data", "dataset") if has_data else ()))
    if has_data and "rl" in sections:  # where the section has flags of its own
        sections = sections | {"data": {"dataset-provider": data}}
    flags = {name: value for title in titles for name, value in sections.get(title, {}).items()}
    refuse_named_code({"model_provider": flags.get("model-provider")}, str(folder), run_flags)
    named = [word for field, name in typed.items() if name is not None for word in (toml_file.flag_name(field), name)]
    stored = _parsed(toml_file.dump_values(flags), folder, named)
    if common.get("model"):
        known = {field.name for field in dataclasses.fields(stored.model_family)}
        family = dataclasses.replace(stored.model_family, **{
            name: value for name, value in common["model"].items() if name in known})
        stored = dataclasses.replace(stored, model_family=family)
    config = _parsed(toml_file.dump({"model": stored.model, "model_family": stored.model_family, "data": stored.data,
                                     "dataset": stored.dataset}), folder, run_flags)
    if common.get("model"):
        provider = registry.model_provider(config.model.model_provider)
        modules = (*provider.encoders(config.model_family), LANGUAGE)
        lines, _ = refused(model_differences(common["model"], provider, config.model_family, modules),
                           config.checkpoint.allowed_differences)
        if lines:
            raise ValueError("\n  ".join([
                f"{folder} holds a model that computes something else than the one of the flags; leave them out, or "
                "give --allow-difference with the name of the flag after the lone --", *lines]))
    return config if has_data or typed["dataset_provider"] is not None else dataclasses.replace(config, dataset=None)


def _has_prompts_of_same_flags(name: str) -> bool:
    """Whether the prompts of a data set, for train_rl.py, have the flags of its samples."""
    prompts = registry.PROMPT_PROVIDERS.get(name)
    return prompts is not None and bool(
        registry.prompt_provider(name).Config is registry.dataset_provider(name).Config)


def _parsed(text: str, folder: Path, flags: Sequence[str]) -> RunConfig:
    """Parse a configuration in TOML, with flags that override it. Raises ValueError, which names the checkpoint."""
    with tempfile.NamedTemporaryFile("w", suffix=".toml", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        try:
            return parse(["--config", file.name, *flags])
        except ValueError as error:
            message = str(error).replace(f"--config {file.name}", "its configuration").replace(file.name, "it")
            raise ValueError(f"{folder}: {message}") from error


def refuse_named_code(named: Mapping[str, Any], source: str, run_flags: Sequence[str]) -> None:
    """Refuse to import code that a file names, because somebody else may have made the file.

    Args:
        named: providers that the file names, by field; None if it names none.
        source: the file, for messages.
        run_flags: flags that a person typed, which replace those of the file.

    Raises:
        ValueError: a provider is neither built in nor named by `run_flags`.
    """
    built_in = {"model_provider": registry.MODEL_PROVIDERS,
                "dataset_provider": registry.DATASET_PROVIDERS | registry.PROMPT_PROVIDERS}
    typed = typed_providers(run_flags)
    for field, name in named.items():
        if name is not None and name not in built_in[field] and typed.get(field) is None:
            flag = toml_file.flag_name(field)
            raise ValueError(f"{source} names {flag} {name}, which is not built in; code that a file names is not run. "
                             f"If you trust it, type its name: -- {flag} {name}")


def named_providers(files: Sequence[str], run_flags: Sequence[str]) -> dict[str, Any]:
    """Return the providers that configuration files, including those of `run_flags`, name; a later file wins.

    Raises:
        ValueError: a file cannot be read.
    """
    named: dict[str, Any] = {}
    for path in (*files, *config_files(run_flags)):
        values = toml_file.read(path, [field.name for field in dataclasses.fields(RunConfig)])
        named |= {field: values[field] for field in ("model_provider", "dataset_provider") if field in values}
    return named


def check_hf_config(config: RunConfig, folder: Path) -> None:
    """Raise ValueError if the --hf-config of a checkpoint's model does not exist any more."""
    path = str(vars(config.model_family).get("hf_config") or "")
    if path and not Path(path).exists():
        raise ValueError(f"{folder} was made with --hf-config {path}, which is not there; give its place at the end "
                         "of the command: -- --hf-config PATH")


def check_sizes(config: RunConfig) -> None:
    """Raise ValueError for a model that no run would accept, whatever its layout."""
    provider = registry.model_provider(config.model.model_provider)
    if isinstance(provider, SizesProvider):
        provider.validate_sizes(config.model_family)


# A progress bar over tensors.


@contextmanager
def tensor_bar(title: str) -> Iterator[Progress]:
    """Yield a callback that moves a bar on standard error; there is no bar if that is no terminal."""
    with tqdm(desc=title, unit=" tensors", disable=None, dynamic_ncols=True) as bar:

        def advance(done: int, total: int, name: str) -> None:
            bar.total = total
            bar.set_postfix_str(name[-48:], refresh=False)
            bar.update(done - bar.n)

        yield advance


_STAGED = ".exporting"
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


def export(flags: ExportFlags, run_flags: list[str]) -> int:
    """Write the folder and say how to load it.

    Raises:
        ValueError: no checkpoint, or one that does not hold the model its configuration names; the folder is not empty.
    """
    out = Path(flags.out)
    base = hub.local_folder("--hf-base", flags.hf_base) if flags.hf_base else ""
    if base:
        hub.download_weights(f"--hf-base {flags.hf_base}", base)
    options = ExportOptions(base, "" if flags.dtype == "auto" else flags.dtype,
                            parse_bytes(flags.max_shard_size, "--max-shard-size"))
    _check_out(out, force=flags.force)
    folder = checkpoint_folder(flags.checkpoint, flags.ckpt_step, "mimo export")
    common = read_common(folder)
    require_checksums(folder)
    if "config" not in common or "grids" not in common:
        raise ValueError(f"{folder}: common.pt is not that of a checkpoint of this trainer")
    config = config_of_checkpoint(common, folder, run_flags)
    check_hf_config(config, folder)
    check_sizes(config)
    provider = registry.model_provider(config.model.model_provider)
    absent = [name for name in provider.encoders(config.model_family) if name not in common["grids"]]
    if absent:
        raise ValueError(f"{folder} holds {', '.join(common['grids'])} alone (--llm-only): a "
                         f"{config.model.model_provider} needs {', '.join(absent)} too")
    # Beside the files that are there, so that a failure leaves them as they were.
    staged = out / _STAGED
    shutil.rmtree(staged, ignore_errors=True)
    try:
        with tensor_bar("exporting") as progress:
            count = export_checkpoint(folder, staged, provider, config.model_family, options, progress)
        # What `mimo import` made was not trained: its --hf-base has the right files.
        note = _write_image_processing(config, provider, staged) if common["consumed_samples"] else ""
        _publish(staged, out)
    except OSError as error:
        raise OSError(f"{out} cannot be written: {error.strerror}") from error
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    print("\n".join([*_closing(out, folder, count, flags), *([f"  {note}"] if note else [])]))
    return 0


def _write_image_processing(config: RunConfig, provider: ModelProvider, folder: Path) -> str:
    """Make the folder specify the pixels of images and videos in training; returns a note where it cannot."""
    if not provider.encoders(config.model_family) or not isinstance(provider, ImageProcessingProvider):
        return ""
    dataset = None if config.dataset is None else config.find_dataset(config.data.dataset_provider)
    if not isinstance(dataset, ImageDataProvider):
        return "how images became pixels in training is not known: see that servers do the same"
    tokens = provider.token_spec(config.model_family)
    chosen = dataset.image_processing(config.dataset, tokens)
    note = provider.write_image_processing(config.model_family, folder, chosen)
    if isinstance(provider, VideoProcessingProvider) and isinstance(dataset, VideoDataProvider):
        videos = dataset.video_processing(config.dataset, tokens)
        if videos is not None:
            provider.write_video_processing(config.model_family, folder, videos)
    return note


def _check_out(out: Path, *, force: bool) -> None:
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; give a folder")
    held = sorted(path.name for path in out.iterdir() if path.name != _STAGED) if out.is_dir() else []
    if held and not force:
        raise ValueError(f"{out} is not empty ({', '.join(held[:3])}{', ...' if len(held) > 3 else ''}); give another "
                         "folder, or --force to write into it")


def _publish(staged: Path, out: Path) -> None:
    """Put the new files in place; weights and adapters of an earlier model would be loaded with them and go first."""
    for path in [*weight_files(out), out / INDEX, out / "adapter_config.json"]:
        path.unlink(missing_ok=True)
    for path in sorted(staged.rglob("*")):
        target = out / path.relative_to(staged)
        if path.is_dir():
            target.mkdir(exist_ok=True)
        else:
            path.replace(target)


def _closing(out: Path, folder: Path, count: int, flags: ExportFlags) -> list[str]:
    files = weight_files(out)
    size = sum(path.stat().st_size for path in files)
    lines = [f"{folder} -> {out}: {counted(count, 'tensor')}, {counted(len(files), 'file')}, {format_bytes(size)}"]
    architectures = (read_config_json(out) or {}).get("architectures") or ["AutoModel"]
    lines.append(f"  transformers.{architectures[0]}.from_pretrained({str(out)!r})")
    if (out / CONFIG_JSON).is_file() and any((out / name).is_file() for name in _TOKENIZERS):
        lines.append(f"  python -m vllm.entrypoints.openai.api_server --model {out}")
    elif flags.hf_base:
        lines.append(f"  --hf-base {flags.hf_base} has no tokenizer; put one there for servers such as vLLM")
    else:
        lines.append("  no tokenizer in it: give --hf-base, the model that training started from, for servers such as "
                     "vLLM")
    return lines


# `mimo import`: a Hugging Face folder's weights as a checkpoint.


def import_(flags: ImportFlags, run_flags: list[str]) -> int:
    """Write the checkpoint and say with which flags it is loaded.

    Raises:
        ValueError: the folder and the model do not fit, all of it listed; `SAVE` has checkpoints already.
    """
    source = pretrained_folder(flags.hf_path)
    name = provider_name(flags.model_provider, source)
    provider = registry.model_provider(name)
    own, shown = ["--model-provider", name], ["--model-provider", name]
    if takes_hf_config(provider) and (source / CONFIG_JSON).is_file() and "--hf-config" not in run_flags:
        # In full: the checkpoint is read from other folders too.
        own += ["--hf-config", str(source.resolve())]
        shown += ["--hf-config", str(source)]
    if flags.dtype == "float32":
        own.append("--no-bf16")
        shown.append("--no-bf16")
    own += [word for key in flags.allow_difference for word in ("--allow-difference", key)]
    config = parse([*own, *run_flags])
    check_sizes(config)
    check_allowed_differences(config)
    with tensor_bar("importing") as progress:
        folder = import_hf(source, flags.save, provider, config.model_family, WEIGHT_DTYPES[flags.dtype], progress,
                           to_toml(config), config.checkpoint.allowed_differences)
    files = [path for path in folder.iterdir() if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    print(f"{source} -> {folder}: {counted(len(files), 'file')}, {format_bytes(size)}")
    print(f"  train_hetero.py {shlex.join([*shown, *run_flags, '--load', flags.save])}")
    return 0
