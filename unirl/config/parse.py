# SPDX-License-Identifier: Apache-2.0
"""From a plain mapping to the config dataclasses. Every error says what was given, what is allowed and which key to change."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


def parse(cls: type[T], values: Mapping[str, Any], where: str = "") -> T:
    """Builds the dataclass `cls` from `values`, recursively.

    Raises `ValueError` for an unknown key (with the nearest allowed one), a missing one, or a value of the wrong type.
    """
    if not isinstance(values, Mapping):
        raise ValueError(
            f"{where or 'the recipe'} is {values!r}; allowed: a mapping of {sorted(_names(cls))}"
        )
    hints = typing.get_type_hints(cls)
    names = _names(cls)
    for key in values:
        if key not in names:
            raise ValueError(
                f"unknown key {_join(where, key)!r}{_nearest(str(key), names)}; allowed here: {', '.join(sorted(names))}"
            )
    built: dict[str, Any] = {}
    for f in dataclasses.fields(cls):  # type: ignore[arg-type]
        if f.name in values:
            built[f.name] = _convert(hints[f.name], values[f.name], _join(where, f.name))
        elif f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            raise ValueError(f"key {_join(where, f.name)!r} is missing; it has no default")
    return cls(**built)


def to_plain(config: Any) -> Any:
    """Dataclasses and tuples as mappings and lists, for YAML and JSON."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {f.name: to_plain(getattr(config, f.name)) for f in dataclasses.fields(config)}
    if isinstance(config, Mapping):
        return {k: to_plain(v) for k, v in config.items()}
    if isinstance(config, (list, tuple)):
        return [to_plain(v) for v in config]
    return config


def changed_keys(
    old: Mapping[str, Any], new: Mapping[str, Any], where: str = ""
) -> dict[str, tuple[Any, Any]]:
    """`{dotted key: (old value, new value)}` of every leaf that differs between two plain configs."""
    changed: dict[str, tuple[Any, Any]] = {}
    for key in sorted(old.keys() | new.keys(), key=str):
        left, right = old.get(key), new.get(key)
        if isinstance(left, Mapping) and isinstance(right, Mapping):
            changed.update(changed_keys(left, right, _join(where, key)))
        elif left != right:
            changed[_join(where, key)] = (left, right)
    return changed


def _names(cls: Any) -> list[str]:
    return [f.name for f in dataclasses.fields(cls)]


def _join(where: str, key: Any) -> str:
    return f"{where}.{key}" if where else str(key)


def _nearest(key: str, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def _convert(hint: Any, value: Any, where: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (types.UnionType, typing.Union):
        if value is None:
            if type(None) in args:
                return None
            raise _wrong(where, value, hint)
        return _convert(_alternative(args, value), value, where)
    if origin is typing.Literal:
        if value not in args:
            near = _nearest(str(value), [str(a) for a in args])
            raise ValueError(f"{where} is {value!r}; allowed: {', '.join(map(str, args))}{near}")
        return value
    if dataclasses.is_dataclass(hint):
        return parse(typing.cast(type, hint), value, where)
    if origin is tuple:
        return _convert_tuple(hint, args, value, where)
    if origin is dict:
        if not isinstance(value, Mapping):
            raise _wrong(where, value, hint)
        return {str(k): _convert(args[1], v, _join(where, k)) for k, v in value.items()}
    return _convert_scalar(hint, value, where)


def _alternative(args: tuple[Any, ...], value: Any) -> Any:
    """The member of a union that the value is meant for: a mapping's if it is one, else the first other."""
    allowed = [a for a in args if a is not type(None)]
    is_mapping = isinstance(value, Mapping)
    return next((a for a in allowed if (typing.get_origin(a) is dict) == is_mapping), allowed[0])


def _convert_tuple(hint: Any, args: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise _wrong(where, value, hint)
    if len(args) == 2 and args[1] is Ellipsis:
        return tuple(_convert(args[0], v, f"{where}[{i}]") for i, v in enumerate(value))
    if len(value) != len(args):
        raise ValueError(f"{where} has {len(value)} values {list(value)}; allowed: exactly {len(args)}")
    return tuple(_convert(a, v, f"{where}[{i}]") for i, (a, v) in enumerate(zip(args, value, strict=True)))


def _convert_scalar(hint: Any, value: Any, where: str) -> Any:
    if hint is bool:
        if not isinstance(value, bool):
            raise _wrong(where, value, hint)
        return value
    if hint is float:
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            raise _wrong(where, value, hint)
        try:
            return float(value)  # YAML reads 1e-3 as text
        except ValueError:
            raise _wrong(where, value, hint) from None
    if hint is int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise _wrong(where, value, hint)
        return value
    if hint is str:
        if not isinstance(value, str):
            raise _wrong(where, value, hint)
        return value
    raise AssertionError(f"{where}: no conversion for {hint}")


def _wrong(where: str, value: Any, hint: Any) -> ValueError:
    name = getattr(hint, "__name__", None) or str(hint)
    return ValueError(f"{where} is {value!r} ({type(value).__name__}); allowed: {name}")
