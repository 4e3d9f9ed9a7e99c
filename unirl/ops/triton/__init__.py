# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of the operators. Imported only where Triton is there; each module has its operator's stem."""
