"""torch.compile and what keeps it off: the identity where TORCHDYNAMO_DISABLE=1 asks for eager execution anyway.

torch honours the variable too, but imports the whole compiler first, which costs each process over a second. Optimizers
do so when they are made and when they take a step.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch


def _identity_if_disabled(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def transform(function: Callable[..., Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        if os.environ.get("TORCHDYNAMO_DISABLE") != "1":
            return original(function, *args, **kwargs)
        return function if function is not None else lambda decorated: decorated

    return transform


def _plain_if_disabled(original: Callable[..., Any]) -> Callable[..., Any]:
    # torch._disable_dynamo keeps what it decorates in __wrapped__.
    return original.__wrapped__ if os.environ.get("TORCHDYNAMO_DISABLE") == "1" else original  # type: ignore[attr-defined]


def _steps_without_breaks(original: Callable[..., Any]) -> Callable[..., Any]:
    # torch's decorator, less its two breaks of a graph that there is not.
    step = _plain_if_disabled(original)
    if step is original:
        return original

    @functools.wraps(step)
    def with_grad_mode(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return step(self, *args, **kwargs)

    return with_grad_mode


CALLS: dict[str, Callable[[Any], Any]] = {
    "torch.compile": _identity_if_disabled,
    "torch.compiler.disable": _identity_if_disabled,
    **{f"torch.optim.Optimizer.{name}": _plain_if_disabled
       for name in ("add_param_group", "load_state_dict", "state_dict", "zero_grad")},
    **{f"torch.optim.{name}.step": _steps_without_breaks for name in ("Adam", "SGD")},
}
