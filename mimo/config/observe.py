"""Flags of what a run leaves behind and shows."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

# MLflow tracking URIs that look like the name of a folder and mean a server.
NO_FOLDERS = ("databricks", "databricks-uc", "uc")


def is_folder(uri: str) -> bool:
    """Return whether MLflow keeps the runs of a tracking URI in files: it is a path or a `file:` URI."""
    return urlsplit(uri).scheme in ("", "file") and uri not in NO_FOLDERS


@dataclass(frozen=True)
class ObserveConfig:
    """Logging: the run folder, TensorBoard, the console."""

    run_dir: str = ""
    """Folder for metrics.jsonl, run_config.toml and other records. Left out: a new folder runs/DATE-TIME-MODEL-DATA
    (runs/latest links to the newest), or the earlier folder of a run that resumes from its own checkpoint."""
    tensorboard_dir: str | None = None
    """TensorBoard folder; left out: none."""
    tensorboard_by_samples: bool = False
    """Also plot every TensorBoard curve against consumed samples (TAG vs samples)."""
    log_interval: int = 1
    """Iterations between console lines; metrics.jsonl has every iteration."""
    progress: bool = True
    """Progress bar when the console is a terminal."""
    timeline: bool = True
    """Time what each rank does in a step; metrics.jsonl gets it by module, `timeline/step-N.json` all of an early step,
    and of the one under way when a rank gets SIGUSR2."""
    timeline_interval: int = 0
    """Iterations between further files of that kind; 0: none."""
    profile_steps: str | None = None
    """FIRST:LAST iteration to trace with torch's profiler, both included; RUN_DIR/profile/rank-R.json.gz."""
    profile_ranks: str | None = None
    """Ranks to trace, such as 0,2; left out: rank 0, and all for --memory-snapshot."""
    memory_snapshot: bool = False
    """Record GPU memory and write it at the end of the run, or where it runs out, to RUN_DIR/memory/rank-R.pickle."""
    nvtx: bool = False
    """NVTX ranges that name module, stage and microbatch, for Nsight Systems."""
    wandb_project: str | None = None
    """Weights & Biases project that gets the figures; left out: none."""
    wandb_name: str | None = None
    """Name of the run there."""
    mlflow_uri: str | None = None
    """MLflow tracking URI that gets the figures: http(s) of a server, a folder, or a database such as sqlite:///FILE;
    left out: none."""
    mlflow_experiment: str | None = None
    """Experiment there; left out: mimo-hetero."""
    peak_tflops: float | None = None
    """TFLOP/s that a GPU can reach, for MFU; left out: dense bf16 of H100, H200, B200, GB200 by the device's name, else
    no MFU."""
    moe_per_layer_logging: bool = False
    """Also log MoE auxiliary losses of each layer."""

    @property
    def profiled_steps(self) -> range:
        """Iterations of --profile-steps; none where it is left out. Raises ValueError for what is no such range."""
        if self.profile_steps is None:
            return range(0)
        first, separator, last = self.profile_steps.partition(":")
        if not (separator and first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
            raise ValueError(f"--profile-steps {self.profile_steps} is not FIRST:LAST with 1 <= FIRST <= LAST, such as "
                             "10:12")
        return range(int(first), int(last) + 1)

    @property
    def profiled_ranks(self) -> tuple[int, ...]:
        """Ranks of --profile-ranks; none where it is left out. Raises ValueError for what is no list of ranks."""
        if self.profile_ranks is None:
            return ()
        words = self.profile_ranks.split(",")
        if not all(word.isdecimal() for word in words):
            raise ValueError(f"--profile-ranks {self.profile_ranks} is not a list of ranks, such as 0,2")
        return tuple(int(word) for word in words)
