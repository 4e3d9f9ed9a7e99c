# SPDX-License-Identifier: Apache-2.0
"""``torch.ops.unirl``: schemas, kernels by device, fake rules and autograd, one module an operator stem."""

from __future__ import annotations

from unirl.ops.library import attention, digest, flow, guidance, noise, packing

__all__ = ["attention", "digest", "flow", "guidance", "noise", "packing"]
