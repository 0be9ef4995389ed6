"""`mimo export`: a checkpoint's weights as a Hugging Face folder."""

from __future__ import annotations

import shutil
from pathlib import Path

from mimo import registry
from mimo.checkpoint.reader import read_common, require_checksums
from mimo.commands.flags import ExportFlags
from mimo.commands.folders import checkpoint_folder
from mimo.commands.model import check_hf_config, check_sizes, config_of_checkpoint
from mimo.commands.progress import tensor_bar
from mimo.config.run import RunConfig
from mimo.grid.text import counted, format_bytes, parse_bytes
from mimo.protocols import ImageDataProvider, ImageProcessingProvider, ModelProvider
from mimo.weights.configuration import CONFIG_JSON, read_config_json
from mimo.weights.export import ExportOptions, export_checkpoint
from mimo.weights.source import INDEX, weight_files

_STAGED = ".exporting"
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


def export(flags: ExportFlags, run_flags: list[str]) -> int:
    """Write the folder and say how to load it.

    Raises:
        ValueError: no checkpoint, or one that does not hold the model its configuration names; the folder is not empty.
    """
    out = Path(flags.out)
    options = ExportOptions(flags.hf_base, "" if flags.dtype == "auto" else flags.dtype,
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
    """Make the folder specify the pixels that the model was trained on; returns a note where it cannot."""
    if not provider.encoders(config.model_family) or not isinstance(provider, ImageProcessingProvider):
        return ""
    dataset = None if config.dataset is None else config.find_dataset(config.data.dataset_provider)
    if not isinstance(dataset, ImageDataProvider):
        return "how images became pixels in training is not known: see that servers do the same"
    chosen = dataset.image_processing(config.dataset, provider.token_spec(config.model_family))
    return provider.write_image_processing(config.model_family, folder, chosen)


def _check_out(out: Path, *, force: bool) -> None:
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; give a folder")
    held = sorted(path.name for path in out.iterdir() if path.name != _STAGED) if out.is_dir() else []
    if held and not force:
        raise ValueError(f"{out} is not empty ({', '.join(held[:3])}{', ...' if len(held) > 3 else ''}); give another "
                         "folder, or --force to write into it")


def _publish(staged: Path, out: Path) -> None:
    """Put the new files in place; weights of an earlier model would be loaded with them and go first."""
    for path in [*weight_files(out), out / INDEX]:
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
        lines.append(f"  vllm serve {out}")
    elif flags.hf_base:
        lines.append(f"  --hf-base {flags.hf_base} has no tokenizer; put one there for servers such as vLLM")
    else:
        lines.append("  no tokenizer in it: give --hf-base, the model that training started from, for servers such as "
                     "vLLM")
    return lines
