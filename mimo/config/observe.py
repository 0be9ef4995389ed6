"""Flags of what a run leaves behind and shows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ObserveConfig:
    """Logging: the run folder, TensorBoard, the console."""

    run_dir: str = "runs/latest"
    """Folder of the run: metrics.jsonl and run_config.toml."""
    tensorboard_dir: str | None = None
    """TensorBoard folder; left out: none."""
    log_interval: int = 1
    """Iterations between console lines; metrics.jsonl has every iteration."""
    progress: bool = True
    """Progress bar when the console is a terminal."""
    timeline: bool = True
    """Time what each rank does in a step, by module."""
    peak_tflops: float | None = None
    """TFLOP/s that a GPU can reach, for MFU; left out: dense bf16 of H100, H200, B200 by the device's name, else no
    MFU."""
    moe_per_layer_logging: bool = False
    """Also log MoE auxiliary losses of each layer."""
