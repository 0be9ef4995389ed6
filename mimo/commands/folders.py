"""Folders that the commands read. They are looked for before torch and Megatron are imported, which takes seconds."""

from __future__ import annotations

from pathlib import Path

from mimo.checkpoint import paths
from mimo.commands.flags import ExportFlags, ImportFlags, InspectFlags


def check_folders(flags: InspectFlags | ExportFlags | ImportFlags) -> None:
    """Raise ValueError where the folder that a command reads is not there, or holds no checkpoint."""
    if isinstance(flags, ImportFlags):
        pretrained_folder(flags.hf_path)
    else:
        checkpoint_folder(flags.checkpoint, flags.ckpt_step,
                          "mimo inspect" if isinstance(flags, InspectFlags) else "mimo export")


def pretrained_folder(path: str) -> Path:
    """The folder with a Hugging Face model. Raises ValueError where there is none."""
    folder = Path(path)
    if not folder.is_dir():
        raise ValueError(f"{folder}: there is no such folder; weights are read from a local folder, never from a hub")
    return folder


def checkpoint_folder(path: str, step: int | None, command: str) -> Path:
    """The folder of the checkpoint that was named. Changes nothing, so that a run may be saving beside it.

    Args:
        path: a folder of checkpoints or a checkpoint's own.
        step: value of `--ckpt-step`.
        command: for messages.

    Raises:
        ValueError: there is none.
    """
    root = Path(path)
    found = paths.find(root, step, command, repair=False)
    if found is None:
        what = f"it has neither {paths.TRACKER} nor {paths.METADATA}" if root.is_dir() else "there is no such folder"
        raise ValueError(f"{command} {path}: no checkpoint: {what}")
    return found
