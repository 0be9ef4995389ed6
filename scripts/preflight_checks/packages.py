"""Check the packages of a run: Transformer Engine, which it needs, and kernels that make it faster."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

from preflight_checks.host import Findings, last_line


def check_transformer_engine(timeout_s: float, findings: Findings) -> None:
    """Import Transformer Engine in another process, which fails if it was built for another torch."""
    # torch comes first, as in the trainer, because it loads libraries such as NCCL that Transformer Engine needs.
    command = [sys.executable, "-c", "import torch, transformer_engine.pytorch"]
    needed = "--transformer-impl transformer_engine: the package"
    try:
        done = subprocess.run(command, text=True, capture_output=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        findings.problems.append(f"{needed} was not imported in {timeout_s:g} s")
        return
    if done.returncode:
        findings.problems.append(f"{needed} cannot be imported by {sys.executable}: {last_line(done.stderr)}; "
                                 "scripts/setup.sh gpu installs it")
    else:
        findings.facts.append("Transformer Engine can be imported")


def check_mamba_kernels(findings: Findings) -> None:
    """Warn if the kernels of Mamba-2 layers are missing."""
    packages = {"mamba_ssm": "mamba-ssm", "causal_conv1d": "causal-conv1d"}
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        findings.warnings.append(f"Mamba-2 layers go without {' and '.join(missing)}, which is slower; "
                                 f"pip install --no-build-isolation {' '.join(packages[name] for name in missing)}")
    else:
        findings.facts.append("kernels of Mamba-2 layers are installed")
