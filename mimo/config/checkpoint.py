"""Flags of checkpoints: where they go, when, and what is taken from one."""

from __future__ import annotations

import os
from dataclasses import dataclass

import tyro

from mimo.config.toml_file import field_name


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints: saving, resuming, pretrained weights."""

    save: str | None = None
    """Folder of the run's checkpoints; left out: nothing is saved."""
    load: str | None = None
    """Folder of checkpoints to go on from. Where it is also --save and still empty, the run starts fresh. Where it is
    another folder, the run starts from it once: as soon as --save has a checkpoint of the run, it goes on from that."""
    save_interval: int | None = None
    """Iterations between checkpoints; left out: only at the end and when the run is told to stop."""
    keep_last: int | None = None
    """Complete checkpoints to keep; older ones are deleted after each save, later ones, of a run that --ckpt-step went
    back from, are not. Left out: all."""
    async_save: bool = False
    """Write checkpoints in the background; training stops only while its state is copied to host memory."""
    save_optim: bool = True
    """--no-save-optim leaves the optimizers out."""
    load_optim: bool = True
    """--no-load-optim starts with fresh optimizers."""
    load_scheduler: bool = True
    """--no-load-scheduler starts the learning-rate schedule anew."""
    save_rng: bool = True
    """--no-save-rng leaves the random generators out."""
    load_rng: bool = True
    """--no-load-rng keeps the generators as --seed sets them."""
    load_data: bool = True
    """--no-load-data starts the data set from its beginning, so that data, blend weights and data flags may change."""
    finetune: bool = False
    """Take only the weights; iteration, optimizers, schedule, generators and data start anew. --save has to be another
    folder than --load; a run that is started again goes on from its own checkpoint there, with everything in it."""
    ckpt_step: int | None = None
    """Iteration to load from --load instead of the latest."""
    dist_ckpt_optim_fully_reshardable: bool = True
    """Taken for scripts written for Megatron-LM: optimizer state is always saved so that every layout can load it."""
    ckpt_verify: bool = True
    """Compare every tensor that is read with the checksum it was saved with."""
    checkpoint_timeout_s: float = 3600.0
    """Seconds that one save, or one load of a checkpoint or of pretrained weights, may take before the run reports what
    it waits for and ends with code 17; 0: any time. With --async-save: that training waits for the files of a save."""
    exit_duration_in_mins: float | None = None
    """Minutes after which the run saves and exits, counted from its start."""
    load_hf: str = ""
    """Folder of a Hugging Face model (safetensors) whose weights the run starts from."""
    load_vision_from: str = ""
    """Folder of a Hugging Face vision tower (CLIP, SigLIP) or model whose tower the encoders start from."""
    load_language_from: str = ""
    """Folder of a Hugging Face language model, or model whose language part the language module starts from."""
    allow_difference: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Name of a flag, such as norm-epsilon, whose value may differ from that of the weights or the checkpoint that the
    run starts from. May be given several times. Any other difference that changes what the model computes or which
    samples come next is refused."""

    @property
    def load_is_save(self) -> bool:
        """Whether --load and --save are one folder, however each is spelled."""
        return self.load is not None and self.save is not None and _real(self.load) == _real(self.save)

    @property
    def starts_elsewhere(self) -> bool:
        """Whether --load names neither the folder of --save nor a checkpoint in it: the run starts there the first
        time, and goes on from --save. False without one of the two."""
        if self.load is None or self.save is None or self.load_is_save:
            return False
        folder, name = os.path.split(_real(self.load))
        return folder != _real(self.save) or not (name.startswith("iter_") or name == "release")

    @property
    def allowed_differences(self) -> frozenset[str]:
        """The field names of the flags that --allow-difference lists, with or without dashes."""
        return frozenset(field_name(key) for key in self.allow_difference)

    @property
    def has_pretrained(self) -> bool:
        """Whether some weights come from a Hugging Face folder."""
        return bool(self.load_hf or self.load_vision_from or self.load_language_from)


def _real(path: str) -> str:
    return os.path.realpath(path)
