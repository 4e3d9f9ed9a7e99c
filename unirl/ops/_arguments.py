# SPDX-License-Identifier: Apache-2.0
"""Argument checks shared by the operators: every error names the argument, what came and what is allowed."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

FLOAT_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGER_DTYPES = (torch.int64, torch.int32)


def check_tensor(name: str, value: object) -> None:
    """Raise ``ValueError`` unless ``value`` is a strided tensor."""
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    if value.layout is not torch.strided:
        raise ValueError(f"{name} must be a strided tensor, got layout {value.layout}")


def check_dtype(name: str, value: Tensor, allowed: Sequence[torch.dtype]) -> None:
    """Raise ``ValueError`` unless the dtype of ``value`` is one of ``allowed``."""
    if value.dtype not in allowed:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        raise ValueError(f"{name} has dtype {str(value.dtype).removeprefix('torch.')}; allowed: {names}")


def check_shape(name: str, value: Tensor, expected: Sequence[int], meaning: str) -> None:
    """Raise ``ValueError`` unless ``value`` has the ``expected`` shape, described by ``meaning``."""
    if tuple(value.shape) != tuple(expected):
        raise ValueError(f"{name} has shape {tuple(value.shape)}; expected {meaning} = {tuple(expected)}")


def check_device(name: str, value: Tensor, expected: torch.device, reference: str) -> None:
    """Raise ``ValueError`` unless ``value`` lies on the device of the argument named ``reference``."""
    if value.device != expected:
        raise ValueError(f"{name} is on {value.device}, {reference} is on {expected}; put both on one device")


def check_choice(name: str, value: object, allowed: Sequence[object]) -> None:
    """Raise ``ValueError`` unless ``value`` is one of ``allowed``."""
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; allowed: {', '.join(repr(choice) for choice in allowed)}")


def check_integer(name: str, value: object) -> int:
    """Return ``value`` as an int; raise ``ValueError`` unless it is an integer (a float would be cut off)."""
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(f"{name} is {value!r}; allowed: an integer") from None


def integers(name: str, values: object) -> list[int]:
    """Return a list of integers, or an integer tensor ``[N]`` (a device is waited for), as a list of ints."""
    if isinstance(values, Tensor):
        check_dtype(name, values, INTEGER_DTYPES)
        if values.ndim != 1:
            raise ValueError(
                f"{name} has {values.ndim} axes; expected an integer tensor [N], or a list of integers"
            )
        return values.tolist()
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise ValueError(f"{name} is {values!r}; expected a list of integers, or an integer tensor [N]")
    return [check_integer(f"a value of {name}", value) for value in values]


def row_values(name: str, value: float | Tensor, num_rows: int, device: torch.device) -> Tensor:
    """Return ``value`` as a float64 tensor ``[num_rows]``: a number is repeated, a tensor must be ``[N]``.

    Raises ``ValueError`` for a tensor that requires a gradient, which no operator gives, and for NaN or infinity
    where the values are on the host.
    """
    if isinstance(value, Tensor):
        check_dtype(name, value, (*FLOAT_DTYPES, *INTEGER_DTYPES))
        check_no_gradient(name, value)
        values = value.detach().to(torch.float64)
        if value.ndim:
            check_shape(name, value, (num_rows,), "[N]")
            check_device(name, value, device, "the sample")
        else:
            values = values.to(device).expand(num_rows)
    elif isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name} must be a number or a tensor [N], got {type(value).__name__}")
    else:
        if not math.isfinite(value):
            raise ValueError(f"{name} is {value}; it must be finite")
        return torch.full((num_rows,), float(value), dtype=torch.float64, device=device)
    if is_readable(values) and not bool(values.isfinite().all()):
        row = int((~values.isfinite()).nonzero()[0])
        raise ValueError(f"{name} is {float(values[row])} in row {row}; it must be finite")
    return values


def check_no_gradient(name: str, value: Tensor) -> None:
    """Raise ``ValueError`` if a gradient of ``value`` would be lost."""
    if value.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name} requires a gradient, but this operator has none for it; detach it")


def token_counts(
    lengths: Sequence[int] | Tensor | None,
    num_rows: int,
    bound: int,
    device: torch.device,
    *,
    name: str = "lengths",
    axis: str = "[N]",
) -> Tensor | None:
    """Return ``lengths`` as an int64 tensor ``[num_rows]`` on ``device``; ``None`` stays ``None``.

    Values on the host are checked against ``0 .. bound``. Values on an accelerator are not read back (that
    would wait for it); the kernels clamp them to the bound.
    """
    if lengths is None:
        return None
    if isinstance(lengths, Tensor):
        check_dtype(name, lengths, INTEGER_DTYPES)
        if lengths.is_meta and device.type != "meta":
            raise ValueError(f"{name} is on meta and holds no values; put it on {device}")
        counts = lengths
    else:
        counts = torch.tensor(integers(name, lengths), dtype=torch.int64)
    check_shape(name, counts, (num_rows,), axis)
    moved = counts.to(device=device, dtype=torch.int64)
    known = next((values for values in (counts, moved) if is_readable(values)), None)
    if known is not None and num_rows:
        low, high = int(known.min()), int(known.max())
        if low < 0 or high > bound:
            raise ValueError(f"{name} holds {low if low < 0 else high}; allowed: 0 to {bound} tokens")
    return moved


def is_readable(value: Tensor) -> bool:
    """Whether values can be read now without waiting for a device: not on an accelerator, not while
    tracing.
    """
    return value.device.type == "cpu" and not torch.compiler.is_compiling() and not is_fake(value)


def real_token_mask(lengths: Tensor, sample: Tensor) -> Tensor:
    """Return a bool tensor ``[N, seq, 1, ...]`` that is true on the real tokens of ``sample`` ``[N, seq,
    ...]``.
    """
    positions = torch.arange(sample.shape[1], device=sample.device)
    mask = positions.unsqueeze(0) < lengths.unsqueeze(1)
    return mask.reshape(mask.shape + (1,) * (sample.ndim - 2))
