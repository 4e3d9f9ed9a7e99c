# SPDX-License-Identifier: Apache-2.0
"""Which kernel runs the attention: one table, asked by device, dtype, head size, L and P.

Never by the number of siblings or groups: a row's bits would depend on its neighbours.
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

import torch
from torch import Tensor

from unirl.ops import _backends, _native

REFERENCE = "reference"
LATER = ""
"""A traced graph's name of a kernel: it is picked when the graph runs, with the memory layouts at hand."""
TRITON_HEAD_SIZES = (64, 128)
TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Inputs = tuple[Tensor, ...]
"""Query, key, value, prefix key and prefix value."""

# Kernels of a device type, the preferred one first. Each module has forward and backward of one signature. The
# composite is for who asks: its sums follow the folded query axis.
_ORDER: dict[str, tuple[str, ...]] = {
    "cpu": ("native", REFERENCE),
    "cuda": ("hopper", "triton", REFERENCE),
}
_ON_REQUEST = ("composite",)
_MODULES = {
    "native": "unirl.ops._native_attention",
    "hopper": "unirl.ops._hopper_attention",
    "triton": "unirl.ops.triton.sibling_prefix_attention",
    "composite": "unirl.ops._composite_attention",
}


def module(name: str) -> ModuleType:
    """Return the module of a kernel; imported on first use, as some need Triton."""
    return importlib.import_module(_MODULES[name])


def names(device_type: str) -> tuple[str, ...]:
    """Names that ``backend=`` may have on a device type, the preferred one first."""
    order = _ORDER.get(device_type, (REFERENCE,))
    return (*order, *_ON_REQUEST) if device_type in _ORDER else order


def why_not(name: str, inputs: Inputs, prefix_lengths: Tensor | None, scale: float) -> str | None:
    """Return why the kernel ``name`` cannot run the call, or ``None`` when it can."""
    query, prefix_key = inputs[0], inputs[3]
    if name == REFERENCE:
        return None
    if name == "native":
        return _native.why_missing("cpu") or module(name).why_unsupported(query, prefix_key)
    if name == "composite":
        return module(name).why_unsupported(query, prefix_lengths)
    if name == "triton":
        return _backends.why_unavailable("triton", query.device.type) or module(name).supports(query)
    hopper = module(name)
    return hopper.why_missing(query.device.index or 0) or hopper.why_unsupported(*inputs, scale)


def route(inputs: Inputs, prefix_lengths: Tensor | None, scale: float) -> str:
    """Return the preferred kernel that takes a call; ``inputs`` are query, key, value, prefix key and value.

    Warns once where a kernel that this device could have is missing.
    """
    device_type = inputs[0].device.type
    for name in _ORDER.get(device_type, (REFERENCE,)):
        if why_not(name, inputs, prefix_lengths, scale) is None:
            return name
        if reason := _why_to_install(name, inputs[0]):
            _backends.warn_once(
                f"unirl.ops: attention on {device_type} runs without its {name} kernel, slower: {reason}"
            )
    return REFERENCE


def _why_to_install(name: str, query: Tensor) -> str | None:
    """Return what would have to be installed for the kernel ``name``, ``None`` where that would not help."""
    if name == "native":
        return _native.why_missing("cpu")
    if name == "triton":
        return _backends.why_unavailable("triton", query.device.type)
    return _native.why_missing("cuda") if module(name).fits_device(query.device.index or 0) else None


def padded_head_size(query: Tensor) -> int | None:
    """The head size that zeros widen a call to, or ``None`` where they do not help.

    On a GPU the kernels take few head sizes, and a product of the reference rounds by the number of rows.
    """
    if query.device.type != "cuda" or _backends.why_unavailable("triton", "cuda"):
        return None
    if query.dtype not in TRITON_DTYPES or query.shape[3] in TRITON_HEAD_SIZES:
        return None
    return min((size for size in TRITON_HEAD_SIZES if size > query.shape[3]), default=None)


def resolve(name: str, inputs: Inputs, prefix_lengths: Tensor | None, scale: float) -> str:
    """Return the kernel that runs the operator of ``torch.ops.unirl``; ``ValueError`` if it cannot be ``name``."""
    pick = route if name == LATER else functools.partial(check_requested, name)
    return pick(inputs, prefix_lengths, scale)


def backward_of(name: str, query: Tensor) -> str:
    """Return the kernel that differentiates what the kernel ``name`` computed."""
    if name == "hopper" and query.shape[3] not in module(name).BACKWARD_HEAD_SIZES:
        return REFERENCE if _backends.why_unavailable("triton", query.device.type) else "triton"
    return name


def check_requested(name: str, inputs: Inputs, prefix_lengths: Tensor | None, scale: float) -> str:
    """Return ``name``, or raise ``ValueError`` that says what is wrong with asking for it."""
    device_type = inputs[0].device.type
    allowed = names(device_type)
    if name not in allowed:
        choices = ", ".join(repr(choice) for choice in (None, *allowed))
        raise ValueError(f"backend is {name!r}; allowed for attention on {device_type}: {choices}")
    if reason := why_not(name, inputs, prefix_lengths, scale):
        raise ValueError(f"backend {name!r} cannot run this call on {device_type}: {reason}")
    return name
