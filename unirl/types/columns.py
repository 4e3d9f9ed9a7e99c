# SPDX-License-Identifier: Apache-2.0
"""Frozen dataclasses of columns: every field says whether its axis 0 is the batch (`row`) or it is `shared`.

Nothing here guesses a batch axis from a shape. A column that holds ROW data is indexed along axis 0; a SHARED value is carried
as it is, and concatenating two tables whose SHARED values differ is an error that names the field.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch

ROW = "row"
SHARED = "shared"


def row(default: Any = dataclasses.MISSING) -> Any:
    """Declares a column: axis 0 of the value is the batch."""
    return dataclasses.field(default=default, metadata={"axis": ROW})


def shared(default: Any = dataclasses.MISSING) -> Any:
    """Declares a value that is one for the whole table."""
    return dataclasses.field(default=default, metadata={"axis": SHARED})


@dataclasses.dataclass(frozen=True)
class Columns:
    """Base of the row containers. Subclasses declare their fields with `row()` and `shared()`."""

    def __post_init__(self) -> None:
        lengths = {
            f.name: _length(getattr(self, f.name))
            for f in _fields(self, ROW)
            if getattr(self, f.name) is not None
        }
        if len(set(lengths.values())) > 1:
            raise ValueError(f"{type(self).__name__}: columns of different lengths: {lengths}")

    def __len__(self) -> int:
        for f in _fields(self, ROW):
            value = getattr(self, f.name)
            if value is not None:
                return _length(value)
        return 0

    def select(self, indices: Sequence[int] | torch.Tensor) -> Self:
        """The rows at `indices`, in that order, as a new table."""
        index = torch.as_tensor(indices, dtype=torch.long)
        if len(index) and (int(index.min()) < 0 or int(index.max()) >= len(self)):
            raise IndexError(f"{type(self).__name__}.select: rows {index.tolist()} of {len(self)}")
        columns = {f.name: _select(getattr(self, f.name), index) for f in _fields(self, ROW)}
        return dataclasses.replace(self, **columns)

    @classmethod
    def concat(cls, tables: Sequence[Self]) -> Self:
        """The rows of all tables, in order. SHARED values must agree; a column must be present in all or in none."""
        if not tables:
            raise ValueError(f"{cls.__name__}.concat: no tables given")
        if len(tables) == 1:
            return tables[0]
        values: dict[str, Any] = {}
        for f in dataclasses.fields(cls):
            parts = [getattr(t, f.name) for t in tables]
            if f.metadata.get("axis") == SHARED:
                if any(not _equal(parts[0], p) for p in parts[1:]):
                    raise ValueError(
                        f"{cls.__name__}.concat: the shared field {f.name!r} differs between the tables: "
                        f"{_distinct(parts)}; rows that differ in it cannot share one table"
                    )
                values[f.name] = parts[0]
            else:
                missing = [p is None for p in parts]
                if any(missing) and not all(missing):
                    raise ValueError(
                        f"{cls.__name__}.concat: column {f.name!r} is missing from some of the tables"
                    )
                values[f.name] = None if missing[0] else cls._concat_column(f.name, parts)
        return cls(**values)

    @classmethod
    def _concat_column(cls, name: str, parts: list[Any]) -> Any:
        return _concat(parts)

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed; lengths are checked again."""
        return dataclasses.replace(self, **changes)


def _fields(table: Any, axis: str) -> list[dataclasses.Field[Any]]:
    return [f for f in dataclasses.fields(table) if f.metadata.get("axis") == axis]


def _length(value: Any) -> int:
    if isinstance(value, Mapping):
        lengths = {len(v) for v in value.values()}
        if len(lengths) > 1:
            raise ValueError(
                f"columns of different lengths in one mapping: {[(k, len(v)) for k, v in value.items()]}"
            )
        return lengths.pop() if lengths else 0
    return len(value)


def _select(value: Any, index: torch.Tensor) -> Any:
    if value is None:
        return None
    if isinstance(value, torch.Tensor):
        return value[index.to(value.device)]
    if isinstance(value, np.ndarray):
        return value[index.numpy()]
    if isinstance(value, Mapping):
        return {k: _select(v, index) for k, v in value.items()}
    if hasattr(value, "select"):
        return value.select(index)
    return tuple(value[i] for i in index.tolist())


def _concat(parts: list[Any]) -> Any:
    first = parts[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(parts)
    if isinstance(first, np.ndarray):
        return np.concatenate(parts)
    if isinstance(first, Mapping):
        if any(p.keys() != first.keys() for p in parts):
            raise ValueError(f"concat: tables with different columns: {[sorted(p) for p in parts]}")
        return {k: _concat([p[k] for p in parts]) for k in first}
    if hasattr(first, "select"):
        return type(first).concat(parts)
    return tuple(item for p in parts for item in p)


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor):
        return isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor) and torch.equal(left, right)
    return bool(left == right)


def _distinct(parts: list[Any]) -> str:
    shown: list[str] = []
    for p in parts:
        if repr(p) not in shown:
            shown.append(repr(p))
    return " / ".join(shown[:4])
