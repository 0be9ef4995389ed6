"""Configuration files: TOML whose keys are flag names, checked against the dataclass fields they set."""

from __future__ import annotations

import difflib
import json
import tomllib
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

NONE_WORDS = ("none", "None")
# Tables that a file may have besides those named after the run's sections.
MORE_TABLES = ("optimizer", "language", "vision", "encoder", "projector")


def field_name(key: str) -> str:
    """Return the field that a flag or key sets; `--micro-batch-size` and `micro-batch-size` set `micro_batch_size`."""
    return key.lstrip("-").replace("-", "_")


def flag_name(field: str) -> str:
    """Return the flag that sets a field: `micro_batch_size` gives `--micro-batch-size`."""
    return "--" + field.replace("_", "-")


def flag_words(field: str, value: Any) -> list[str]:
    """Return the words that give a field a value: `--name value`, `--name none`, `--name` or `--no-name`."""
    if isinstance(value, bool):
        return [flag_name(field if value else f"no_{field}")]
    return [flag_name(field), "none" if value is None else str(value)]


def read(path: str, sections: Collection[str]) -> dict[str, Any]:
    """Return the field names and raw values of one file. Tables only group keys: any key may be in any table.

    A table must be named after one of the run's sections or be one of `MORE_TABLES`.

    Raises:
        ValueError: the file cannot be read, is not TOML, has another table, or sets a field twice.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--config {path}: {error.strerror}") from error
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"--config {path}: not valid TOML: {error}") from error
    values: dict[str, Any] = {}
    _flatten(tables, path, [name.replace("_", "-") for name in sections] + list(MORE_TABLES), values)
    return values


def _flatten(table: Mapping[str, Any], path: str, known_tables: Sequence[str], values: dict[str, Any]) -> None:
    for key, value in table.items():
        name = field_name(key)
        if isinstance(value, dict):
            title = key.replace("_", "-")
            if title not in known_tables:
                near = difflib.get_close_matches(title, known_tables, n=1, cutoff=0.6)
                hint = f"did you mean [{near[0]}]?" if near else f"known tables are {', '.join(sorted(known_tables))}"
                raise ValueError(f"--config {path}: there is no table [{key}]; {hint}")
            _flatten(value, path, known_tables, values)
        elif name in values:
            raise ValueError(f"--config {path}: {key} is set twice")
        else:
            values[name] = value


def check_known(unknown: Mapping[str, str], known: Sequence[str], hint_for: Callable[[str], str | None]) -> None:
    """Raise one ValueError that lists every unknown key, with what to use instead if that is known.

    Args:
        unknown: unknown field name -> file that sets it.
        known: names of all fields; the nearest are named where there is no hint.
        hint_for: returns advice on a flag, or None if there is none.
    """
    if not unknown:
        return
    lines = []
    for name, path in unknown.items():
        line, hint = f"{flag_name(name)[2:]} in {path}", hint_for(flag_name(name))
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
        if hint is not None:
            line += f" (it {hint})"
        elif near:
            line += f" (did you mean {' or '.join(flag_name(match)[2:] for match in near)}?)"
        lines.append(line)
    raise ValueError("--config: unknown keys: " + ", ".join(lines))


@cache
def typed_fields(section: type) -> Mapping[str, Any]:
    """Return the types of a section's fields by name."""
    hints = get_type_hints(section, include_extras=True)
    return {field.name: hints[field.name] for field in fields(section)}


def convert(value: Any, annotation: Any) -> Any:
    """Convert a TOML value to `annotation`: scalars, Literal, `X | None`, tuples and lists of these.

    An integer is accepted as a float, and the string `none` means None where None is allowed.

    Raises:
        ValueError: the value has another type; the message names the expected one.
    """
    origin, options = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return convert(value, options[0])
    if origin is Literal:
        if value in options and type(value) in {type(option) for option in options}:
            return value
        raise ValueError(f"expected one of {', '.join(map(str, options))}")
    if origin in (Union, types.UnionType):
        return _convert_union(value, options)
    if origin in (tuple, list) and isinstance(value, list):
        items = (options[0],) * len(value) if origin is list or options[-1] is Ellipsis else options
        if len(items) != len(value):
            raise ValueError(f"expected {len(items)} values")
        return origin(convert(item, kind) for item, kind in zip(value, items, strict=True))
    if annotation is float and type(value) is int:
        return float(value)
    if annotation is Path and type(value) is str:
        return Path(value)
    if type(value) is annotation:
        return value
    names = {int: "an integer", float: "a number", bool: "true or false", str: "a string", Path: "a string"}
    raise ValueError(f"expected {names.get(annotation, f'a value of type {annotation}')}")


def _convert_union(value: Any, options: tuple[Any, ...]) -> Any:
    if type(None) in options and value in NONE_WORDS:
        return None
    expected = []
    for option in options:
        if option is type(None):
            continue
        try:
            return convert(value, option)
        except ValueError as error:
            expected.append(str(error).removeprefix("expected "))
    raise ValueError("expected " + " or ".join(expected))


def dump(sections: Mapping[str, Any]) -> str:
    """Format sections (name -> dataclass instance) as TOML, one table each. Reading it gives the same values.

    A value of None is left out if it is the field's default, and otherwise written as `"none"`.
    """
    lines: list[str] = []
    for title, section in sections.items():
        lines += ([""] if lines else []) + [f"[{title.replace('_', '-')}]"]
        for field in fields(section):
            value = getattr(section, field.name)
            default = field.default_factory() if field.default_factory is not MISSING else field.default
            if value is None and default is None:
                continue
            lines.append(f"{flag_name(field.name)[2:]} = {_literal('none' if value is None else value)}")
    return "\n".join(lines) + "\n"


def dump_values(values: Mapping[str, Any]) -> str:
    """Format keys and values, as `tomllib` reads them, as TOML without tables."""
    return "".join(f"{key} = {_literal(value)}\n" for key, value in values.items())


def _literal(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_literal(item) for item in value) + "]"
    if isinstance(value, str | Path):
        # JSON's escapes are TOML's, except that TOML also forbids a raw DEL and has no surrogate pairs.
        return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
    raise ValueError(f"a value of type {type(value).__name__} cannot be written to TOML")
