"""Convert states of Energon data sets to plain objects, which `torch.load(weights_only=True)` reads, and back.

Numbers, strings, bytes, None and lists stay as they are. Everything else becomes a dict with one key, the name of its
type, such as `{"tuple": [...]}`, so that no dict of the data can be mistaken for another type.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from megatron.energon.flavors.webdataset.sample_loader import SliceState
from megatron.energon.rng import SystemRngState
from megatron.energon.savable_loader import SavableDatasetCheckpoint, SavableDatasetState
from megatron.energon.state import FlexState

SCALARS = (bool, int, float, str, bytes, type(None))
DATACLASSES = {
    cls.__name__: cls for cls in (SavableDatasetCheckpoint, SavableDatasetState, SliceState, SystemRngState)
}


def to_plain(state: Any) -> Any:
    """Convert a state to plain objects.

    Raises:
        TypeError: the state holds an object of an unknown type; the message names it.
    """
    kind = type(state)  # exact types, because a subclass would come back as another type
    if kind in SCALARS:
        return state
    if kind is list:
        return [to_plain(item) for item in state]
    if kind is tuple:
        return {"tuple": [to_plain(item) for item in state]}
    if kind is dict or kind is FlexState:
        return {kind.__name__: [[to_plain(key), to_plain(value)] for key, value in state.items()]}
    if kind is np.ndarray and state.dtype.kind in "biuf":
        return {"ndarray": [state.dtype.str, list(state.shape), state.tobytes()]}
    if kind is torch.Tensor and state.dtype is torch.uint8:  # generators' states; other dtypes would have to be stored
        return {"tensor": state.numpy().tobytes()}
    if kind in DATACLASSES.values():
        fields = [[field.name, to_plain(vars_of(state)[field.name])] for field in dataclasses.fields(state)]
        return {kind.__name__: fields}
    raise TypeError(f"the state of the data set holds a {kind.__module__}.{kind.__qualname__}, which cannot be saved")


def vars_of(state: Any) -> dict[str, Any]:
    """Return the fields of a data class with slots, which has no `__dict__`, without copying them."""
    return {field.name: object.__getattribute__(state, field.name) for field in dataclasses.fields(state)}


def from_plain(plain: Any) -> Any:
    """Convert plain objects back to a state of new objects.

    Raises:
        TypeError: a type is unknown; the message names it.
    """
    if type(plain) in SCALARS:
        return plain
    if type(plain) is list:
        return [from_plain(item) for item in plain]
    if type(plain) is not dict or len(plain) != 1:
        raise TypeError(f"not the state of an Energon data set: {type(plain).__name__}")
    ((name, value),) = plain.items()
    if name == "tuple":
        return tuple(from_plain(item) for item in value)
    if name in ("dict", "FlexState"):
        items = {from_plain(key): from_plain(item) for key, item in value}
        return items if name == "dict" else FlexState(items)
    if name == "ndarray":
        dtype, shape, data = value
        return np.frombuffer(data, np.dtype(dtype)).reshape(shape).copy()
    if name == "tensor":
        return torch.frombuffer(bytearray(value), dtype=torch.uint8)
    if name in DATACLASSES:
        return DATACLASSES[name](**{field: from_plain(item) for field, item in value})
    raise TypeError(f"the state of the data set holds a {name!r}, which is not known here")
