# SPDX-License-Identifier: Apache-2.0
"""The extension ``unirl._C``: whether it is there, and tensors as the addresses and strides it takes."""

from __future__ import annotations

import importlib
from types import ModuleType

import torch
from torch import Tensor

try:
    extension: ModuleType | None = importlib.import_module("unirl._C")
    _import_error = ""
except ImportError as error:
    extension, _import_error = None, str(error)

DTYPE_CODES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
RowsArgument = tuple[int, int, int]
NO_ROWS: RowsArgument = (0, 0, 0)


def why_missing(device_type: str) -> str | None:
    """Return why there are no native kernels for a device type, or ``None`` when there are."""
    if extension is None:
        return f"the extension unirl._C is not built ({_import_error}); run pip install -e ."
    if device_type == "cpu":
        return None
    if device_type != "cuda":
        return f"unirl._C has no kernels for {device_type}"
    if extension.cuda_architectures is None:
        return "unirl._C was built without CUDA; install with nvcc on the PATH, or with UNIRL_BUILD_CUDA=1"
    return None


def kernels() -> ModuleType:
    """Return the extension; callers have asked :func:`why_missing` first."""
    assert extension is not None, _import_error
    return extension


def contiguous_rows(tensor: Tensor) -> Tensor:
    """Return ``tensor`` ``[N, ...]`` when each row is contiguous (rows may have any stride), else a copy."""
    if tensor.numel() == 0 or tensor[0].is_contiguous():
        return tensor
    return tensor.contiguous()


def rows(tensor: Tensor | None) -> RowsArgument:
    """Return (address, dtype code, row stride in elements) of ``[N, ...]`` with contiguous rows."""
    if tensor is None:
        return NO_ROWS
    return tensor.data_ptr(), DTYPE_CODES[tensor.dtype], tensor.stride(0)


def address(tensor: Tensor | None) -> int:
    """Return the address of a contiguous tensor, 0 for ``None``."""
    return 0 if tensor is None else tensor.data_ptr()


def num_threads() -> int:
    """Threads that a CPU kernel may use: torch's own setting."""
    return torch.get_num_threads()
