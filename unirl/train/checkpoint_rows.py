# SPDX-License-Identifier: Apache-2.0
"""Row containers as tensors and JSON, and back: what a checkpoint does with groups that wait in a buffer.

Only the types named here are ever built, so a file from a stranger can make rows and nothing else.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from unirl.types import (
    Canvas,
    LatentSegment,
    LayoutRecord,
    NoiseRecipe,
    Part,
    RaggedLatents,
    Sample,
    SamplingParams,
)

_CLASSES: dict[str, type] = {
    c.__name__: c
    for c in (Part, LatentSegment, RaggedLatents, LayoutRecord, Sample, SamplingParams, NoiseRecipe)
}
_SPECIAL_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def columns_to_tensors(value: Any, name: str) -> tuple[dict[str, torch.Tensor], Any]:
    """Takes rows apart.

    Args:
        value: a `Part`, a `LatentSegment`, a `Sample`, or lists, tuples and mappings of these, of tensors,
            arrays, numbers and text.
        name: prefix of the tensors' names.

    Returns:
        tensors by name, and a JSON description that `columns_from_tensors` takes with them.

    Raises:
        ValueError: something that cannot be saved, named by its path.
    """
    tensors: dict[str, torch.Tensor] = {}
    return tensors, _describe(value, name, tensors)


def columns_from_tensors(description: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Puts together what `columns_to_tensors` took apart: equal values, bit for bit, and of the same
    types.
    """
    match description:
        case None | bool() | int() | float() | str():
            return description
    kind, content = description["kind"], description.get("of")
    match kind:
        case "tensor":
            return tensors[content]
        case "array":
            return tensors[content].numpy()
        case "float":
            return _SPECIAL_FLOATS[content]
        case "list":
            return [columns_from_tensors(v, tensors) for v in content]
        case "tuple":
            return tuple(columns_from_tensors(v, tensors) for v in content)
        case "canvas":
            return Canvas(*content)
        case "dict":
            return {k: columns_from_tensors(v, tensors) for k, v in content}
        case _ if kind in _CLASSES:
            return _CLASSES[kind](**{k: columns_from_tensors(v, tensors) for k, v in content})
    raise ValueError(
        f"saved rows hold a {kind!r}; allowed: "
        f"{', '.join([*_CLASSES, 'tensor', 'array', 'list', 'tuple', 'dict'])}"
    )


def _describe(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"kind": "float", "of": str(value)}
    if isinstance(value, torch.Tensor):
        tensors[path] = value
        return {"kind": "tensor", "of": path}
    if isinstance(value, np.ndarray):
        tensors[path] = torch.from_numpy(
            np.array(value, order="C")
        )  # a copy: the source may be read-only memory
        return {"kind": "array", "of": path}
    if isinstance(value, np.generic):
        return _describe(value.item(), path, tensors)
    if isinstance(value, Canvas):
        return {"kind": "canvas", "of": list(value)}
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return {"kind": kind, "of": [_describe(v, f"{path}.{i}", tensors) for i, v in enumerate(value)]}
    if isinstance(value, Mapping):
        if strange := [k for k in value if not isinstance(k, str)]:
            raise ValueError(f"{path}: key {strange[0]!r} cannot be saved; allowed: text")
        return {"kind": "dict", "of": [[k, _describe(v, f"{path}.{k}", tensors)] for k, v in value.items()]}
    if type(value) in _CLASSES.values():
        fields = [
            [f.name, _describe(getattr(value, f.name), f"{path}.{f.name}", tensors)]
            for f in dataclasses.fields(value)
        ]
        return {"kind": type(value).__name__, "of": fields}
    raise ValueError(
        f"{path} is a {type(value).__name__}, which a checkpoint cannot hold; allowed: "
        f"{', '.join(_CLASSES)}, tensors, arrays, numbers, text "
        "and lists, tuples and mappings of them (resolve references to stored segments first)"
    )
