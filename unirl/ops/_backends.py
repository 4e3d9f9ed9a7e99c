# SPDX-License-Identifier: Apache-2.0
"""Which backend runs an operator: the device's own by default, a named one on request.

A named one that is missing is an error. Where the device's own is missing, plain PyTorch gives the right result, slowly:
that is said once, by a warning that names what is missing and how to get it.
"""

from __future__ import annotations

import functools
import importlib.util
import warnings

import torch

from unirl.ops import _native

REFERENCE = "reference"

# The kernels of each operator by device type; other devices have the reference.
_KERNELS: dict[str, dict[str, str]] = {
    "keyed_normal": {"cpu": "native", "cuda": "triton"},
    "flow": {"cpu": "native", "cuda": "triton"},
    "guided_velocity": {"cpu": "native", "cuda": "triton"},
    "packing": {"cpu": "native", "cuda": "native"},
    "digest": {"cpu": "native", "cuda": "native"},
}


# Whether Triton can be imported; it is not imported to find out.
HAS_TRITON = importlib.util.find_spec("triton") is not None


def why_unavailable(backend: str, device_type: str) -> str | None:
    """Return what ``backend`` lacks on a device type, or ``None``."""
    if backend == "native":
        return _native.why_missing(device_type)
    if backend == "triton" and not HAS_TRITON:
        return "Triton is not installed; it comes with torch's GPU builds (pip install triton)"
    return None


def default_backend(operator: str, device_type: str) -> str:
    """Return the backend that ``backend=None`` means on a device type; warn once where its kernel is missing."""
    name = _KERNELS[operator].get(device_type, REFERENCE)
    reason = why_unavailable(name, device_type)
    if reason is None:
        return name
    warn_once(f"unirl.ops: {operator} on {device_type} runs in plain PyTorch, which is slow: {reason}")
    return REFERENCE


def warn_once(message: str) -> None:
    """Give a ``RuntimeWarning`` the first time that a message comes (never while a graph is traced)."""
    if not torch.compiler.is_compiling():
        _warn(message)


@functools.cache
def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=4)


def pick(operator: str, device: torch.device, requested: str | None) -> str:
    """Return the backend to run, or raise ``ValueError`` that says what is wrong with the requested one."""
    if requested is None:
        return default_backend(operator, device.type)
    name = _KERNELS[operator].get(device.type)
    if requested not in (REFERENCE, name):
        allowed = [REFERENCE] if name is None else [name, REFERENCE]
        choices = ", ".join(repr(choice) for choice in [None, *allowed])
        raise ValueError(f"backend is {requested!r}; allowed for {operator} on {device.type}: {choices}")
    if reason := why_unavailable(requested, device.type):
        raise ValueError(f"backend {requested!r} is not available on {device.type}: {reason}")
    return requested
