"""`train_rl.py` whose engine gets, with the version that CHANGED names, one weight that the trainer does not have."""

from __future__ import annotations

import os
import runpy
from pathlib import Path

from mimo.platform import get_platform

get_platform("cpu")  # before anything imports Megatron

from mimo.refit.options import RefitReport  # noqa: E402
from mimo.refit.sender import WeightSender  # noqa: E402

send = WeightSender.send


def send_changed(self: WeightSender, version: str) -> RefitReport:
    """Send it, then have the weight back."""
    if version != os.environ["CHANGED"]:
        return send(self, version)
    tensors = self.weights.prepare()
    # Parameters require gradients, and a view of one cannot be written in place.
    weight = next(tensor for name, tensor in tensors.items() if name.endswith("final_layernorm.weight")).detach()
    weight[0] += 4
    try:
        return send(self, version)
    finally:
        weight[0] -= 4


if __name__ == "__main__":
    WeightSender.send = send_changed  # type: ignore[method-assign]
    runpy.run_path(str(Path(__file__).resolve().parents[2] / "train_rl.py"), run_name="__main__")
