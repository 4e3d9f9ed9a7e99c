# SPDX-License-Identifier: Apache-2.0
"""Argument checks shared by the operators: every error names the argument, what came and what is allowed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

FLOAT_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


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


def row_values(name: str, value: float | Tensor, num_rows: int, device: torch.device) -> Tensor:
    """Return ``value`` as a float64 tensor ``[num_rows]``: a number is repeated, a tensor must be ``[N]``."""
    if isinstance(value, Tensor) and value.ndim:
        check_shape(name, value, (num_rows,), "[N]")
        check_device(name, value, device, "the sample")
        return value.detach().to(torch.float64)
    if isinstance(value, Tensor):
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name} must be a number or a tensor [N], got {type(value).__name__}")
    return torch.full((num_rows,), float(value), dtype=torch.float64, device=device)


def token_counts(
    lengths: Sequence[int] | Tensor | None, num_rows: int, bound: int, device: torch.device
) -> Tensor | None:
    """Return ``lengths`` as an int64 tensor ``[num_rows]`` on ``device``; ``None`` stays ``None``.

    Values on the host are checked against ``0 .. bound``. Values on an accelerator are not read back (that
    would wait for it); the kernels clamp them to the bound.
    """
    if lengths is None:
        return None
    if isinstance(lengths, Tensor):
        check_dtype("lengths", lengths, (torch.int64, torch.int32))
        counts = lengths
    else:
        counts = torch.tensor([int(length) for length in lengths], dtype=torch.int64)
    check_shape("lengths", counts, (num_rows,), "[N]")
    if is_readable(counts) and num_rows:
        low, high = int(counts.min()), int(counts.max())
        if low < 0 or high > bound:
            wrong = low if low < 0 else high
            raise ValueError(f"lengths holds {wrong}; every row needs between 0 and {bound} tokens")
    return counts.to(device=device, dtype=torch.int64)


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
