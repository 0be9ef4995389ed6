"""torch.compile: the identity where TORCHDYNAMO_DISABLE=1 asks for eager execution anyway.

torch honours the variable too, but imports the whole compiler first, which costs each process over a second.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any


def _identity_if_disabled(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def transform(function: Callable[..., Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        if os.environ.get("TORCHDYNAMO_DISABLE") != "1":
            return original(function, *args, **kwargs)
        return function if function is not None else lambda decorated: decorated

    return transform


CALLS: dict[str, Callable[[Any], Any]] = {
    "torch.compile": _identity_if_disabled,
    "torch.compiler.disable": _identity_if_disabled,
}
