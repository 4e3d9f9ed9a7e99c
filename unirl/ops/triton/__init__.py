# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of the operators. Imported only where Triton is there; each module has its operator's stem."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def on_device_of_first(function: Function) -> Function:
    """Run ``function`` with its first argument's GPU as the current one, which is where Triton launches."""

    @functools.wraps(function)
    def guarded(*arguments: Any, **options: Any) -> Any:
        with torch.cuda.device_of(arguments[0]):
            return function(*arguments, **options)

    return guarded  # type: ignore[return-value]
