# SPDX-License-Identifier: Apache-2.0
"""The packed key/value buffer of one attention layer: the prefix once a group, own rows once a sibling."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from unirl.ops import _arguments as arguments
from unirl.ops.attention import sibling_prefix_attention


class SiblingKV:
    """Keys and values of G groups of n siblings in one storage each, so that nothing is ever concatenated.

    Storage rows are tokens: first ``G P`` prefix tokens, then ``G n L`` own tokens, each row ``Hk D``
    values. The prefix is written once a rollout, own rows at every step. Writes are in place, for use
    without gradients; a differentiable call passes its tensors to :func:`unirl.ops.sibling_prefix_attention`
    directly.

    Args:
        num_groups, siblings: G and n.
        prefix_length, own_length: P and L, in tokens; P may be 0.
        num_key_heads, head_size: Hk and D.
        dtype, device: of the storage.
    """

    def __init__(
        self,
        *,
        num_groups: int,
        siblings: int,
        prefix_length: int,
        own_length: int,
        num_key_heads: int,
        head_size: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        for name, size, least in (
            ("num_groups", num_groups, 1),
            ("siblings", siblings, 1),
            ("prefix_length", prefix_length, 0),
            ("own_length", own_length, 1),
            ("num_key_heads", num_key_heads, 1),
            ("head_size", head_size, 1),
        ):
            if arguments.check_integer(name, size) < least:
                raise ValueError(f"{name} is {size}; allowed: at least {least}")
        arguments.check_choice("dtype", dtype, arguments.FLOAT_DTYPES)
        prefix_rows, own_rows = num_groups * prefix_length, num_groups * siblings * own_length
        self.num_groups = num_groups
        self.siblings = siblings
        self.prefix_lengths: Tensor | None = None
        self._unwritten = {"write_own"} if prefix_length == 0 else {"write_prefix", "write_own"}
        self.storage = torch.zeros(
            (2, prefix_rows + own_rows, num_key_heads * head_size), dtype=dtype, device=device
        )
        prefix_shape = (2, num_groups, prefix_length, num_key_heads, head_size)
        own_shape = (2, num_groups * siblings, own_length, num_key_heads, head_size)
        prefix = self.storage[:, :prefix_rows].view(prefix_shape).transpose(2, 3)
        own = self.storage[:, prefix_rows:].view(own_shape).transpose(2, 3)
        self.prefix_key, self.prefix_value = prefix[0], prefix[1]
        self.key, self.value = own[0], own[1]

    def write_prefix(
        self, key: Tensor, value: Tensor, prefix_lengths: Sequence[int] | Tensor | None = None
    ) -> None:
        """Write the prefix ``[G, Hk, P, D]`` of every group, and how many of its tokens are real ``[G]``."""
        lengths = arguments.token_counts(
            prefix_lengths,
            self.num_groups,
            self.prefix_key.shape[2],
            self.storage.device,
            name="prefix_lengths",
            axis="[G]",
        )
        _write("key", key, self.prefix_key, "[G, Hk, P, D]")
        _write("value", value, self.prefix_value, "[G, Hk, P, D]")
        self.prefix_lengths = lengths
        self._unwritten.discard("write_prefix")

    def write_own(self, key: Tensor, value: Tensor) -> None:
        """Write the siblings' own keys and values ``[N, Hk, L, D]``."""
        _write("key", key, self.key, "[N, Hk, L, D]")
        _write("value", value, self.value, "[N, Hk, L, D]")
        self._unwritten.discard("write_own")

    def attend(
        self,
        query: Tensor,
        *,
        scale: float | None = None,
        return_lse: bool = False,
        backend: str | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend ``query`` ``[N, Hq, L, D]`` to what was written; see :func:`sibling_prefix_attention`.

        Raises:
            ValueError: prefix or own rows were never written, or ``query`` requires a gradient.
        """
        if self._unwritten:
            raise ValueError(
                f"there is nothing to attend to yet; call {' and '.join(sorted(self._unwritten))} first"
            )
        arguments.check_tensor("query", query)
        arguments.check_no_gradient("query", query)
        return sibling_prefix_attention(
            query,
            self.key,
            self.value,
            self.prefix_key,
            self.prefix_value,
            prefix_lengths=self.prefix_lengths,
            scale=scale,
            return_lse=return_lse,
            backend=backend,
        )


def _write(name: str, values: Tensor, target: Tensor, meaning: str) -> None:
    arguments.check_tensor(name, values)
    arguments.check_dtype(name, values, arguments.FLOAT_DTYPES)
    arguments.check_shape(name, values, target.shape, meaning)
    arguments.check_no_gradient(name, values)
    target.copy_(values)
