"""`mimo import`: a Hugging Face folder's weights as a checkpoint."""

from __future__ import annotations

import shlex

from mimo import registry
from mimo.commands.compare import torch_dtype
from mimo.commands.flags import ImportFlags
from mimo.commands.folders import pretrained_folder
from mimo.commands.model import check_sizes, provider_name, takes_hf_config
from mimo.commands.progress import tensor_bar
from mimo.config.cli import parse, to_toml
from mimo.config.validate import check_allowed_differences
from mimo.grid.text import counted, format_bytes
from mimo.weights.configuration import CONFIG_JSON
from mimo.weights.import_checkpoint import import_hf


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
        folder = import_hf(source, flags.save, provider, config.model_family, torch_dtype(flags.dtype), progress,
                           to_toml(config), config.checkpoint.allowed_differences)
    files = [path for path in folder.iterdir() if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    print(f"{source} -> {folder}: {counted(len(files), 'file')}, {format_bytes(size)}")
    print(f"  train_hetero.py {shlex.join([*shown, *run_flags, '--load', flags.save])}")
    return 0
