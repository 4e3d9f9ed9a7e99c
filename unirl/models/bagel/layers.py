# SPDX-License-Identifier: Apache-2.0
"""The small modules that the language model and the vision tower are made of."""

from __future__ import annotations

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unirl.models.bagel import fused

_ROW_BLOCKS = (8, 16, 32, 64)
_MULTIPLES = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32)
_MAX_CHECKED_WEIGHTS = 1 << 20
# A GPU gives more threads to each sum, in another order, when there are fewer sums than this.
_REDUCED_ROWS = 16


class Linear(nn.Linear):
    """``nn.Linear`` that can keep a row's bits independent of how many rows share the call.

    A library picks the kernel of a matrix product by its shape, so a row's last bits may change with the batch
    around it. With ``batch_invariant``, on a CPU, rows are padded with zeros to a multiple of a small block, as
    products of very few rows go through other kernels there; which block that is, is found out on the machine
    itself. On a GPU, and where no block will do, each entry of the first axis has a product of its own, whose
    shape is the same in every batch.
    """

    batch_invariant = False

    def forward(self, input: Tensor) -> Tensor:
        if not self.batch_invariant:
            return F.linear(input, self.weight, self.bias)
        block = 0
        if not input.is_cuda:
            block = row_block(self.in_features, self.out_features, self.bias is not None)
        return self.by_block(input, block) if block else self.by_entry(input)

    def by_block(self, input: Tensor, block: int) -> Tensor:
        """``[..., in]`` to ``[..., out]`` in one product of a multiple of ``block`` rows."""
        rows = input.numel() // input.shape[-1]
        missing = -rows % block
        if not missing:
            return F.linear(input, self.weight, self.bias)
        flat = F.pad(input.reshape(rows, input.shape[-1]), (0, 0, 0, missing))
        return F.linear(flat, self.weight, self.bias)[:rows].reshape(*input.shape[:-1], self.out_features)

    def by_entry(self, input: Tensor) -> Tensor:
        """``[N, ..., in]`` to ``[N, ..., out]`` in N products of one shape."""
        if not input.numel():
            return F.linear(input, self.weight, self.bias)
        entries = input.reshape(input.shape[0], -1, input.shape[-1]).unbind()
        products = [F.linear(entry, self.weight, self.bias) for entry in entries]
        return torch.stack(products).reshape(*input.shape[:-1], self.out_features)


@functools.cache
def row_block(num_in: int, num_out: int, has_bias: bool) -> int:
    """The smallest number of rows whose multiples all give a row the same float32 bits on this CPU, or 0.

    Found by trying; weights of more than a million entries are not tried.
    """
    if num_in * num_out > _MAX_CHECKED_WEIGHTS:
        return 0
    generator = torch.Generator().manual_seed(0)
    largest = max(_ROW_BLOCKS) * max(_MULTIPLES)
    rows, weight, bias = (
        torch.randn(s, generator=generator) for s in ((largest, num_in), (num_out, num_in), num_out)
    )
    with torch.inference_mode():
        products = F.linear(rows, weight, bias if has_bias else None)
        for block in _ROW_BLOCKS:
            counts = [block * multiple for multiple in _MULTIPLES]
            if all(
                torch.equal(F.linear(rows[:count], weight, bias if has_bias else None), products[:count])
                for count in counts
            ):
                return block
    return 0


def make_batch_invariant(module: nn.Module, enabled: bool = True) -> None:
    """Switch every linear layer and norm below ``module`` to batch-invariant arithmetic, adapter layers included.

    Plain ``nn.Linear`` children (peft's ``lora_A`` and ``lora_B``) are replaced by :class:`Linear` holding
    the same parameters, so call this after an adapter has been injected and before an optimizer looks for
    modules.
    """
    for child_name, child in list(module.named_children()):
        if type(child) is nn.Linear and enabled:
            replacement = Linear(child.in_features, child.out_features, bias=False, device="meta")
            replacement.weight, replacement.bias = child.weight, child.bias
            replacement.train(child.training)
            setattr(module, child_name, replacement)
            child = replacement
        if isinstance(child, (Linear, RMSNorm)):
            child.batch_invariant = enabled
        else:
            make_batch_invariant(child, enabled)


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last axis; statistics are float32 whatever ``x`` is."""

    batch_invariant = False

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        """``[..., width]`` in, the same shape and dtype out."""
        if fused.fusable(hidden, self.weight):
            return fused.rms_norm(hidden, self.weight, self.eps)
        wide = hidden.float()
        squares = wide.square()
        means = _row_means(squares) if self.batch_invariant else squares.mean(dim=-1, keepdim=True)
        inverse = torch.rsqrt(means + self.eps)
        return self.weight * (wide * inverse).to(hidden.dtype)


def _row_means(values: Tensor) -> Tensor:
    """Means over the last axis, which stays as 1; a row's mean has the same bits in every batch."""
    rows = values.numel() // values.shape[-1]
    if not values.is_cuda or rows >= _REDUCED_ROWS:
        return values.mean(dim=-1, keepdim=True)
    padded = F.pad(values.reshape(rows, -1), (0, 0, 0, _REDUCED_ROWS - rows))
    return padded.mean(dim=-1, keepdim=True)[:rows].reshape(*values.shape[:-1], 1)


class Rotary:
    """Cosines and sines of rotary positions, in float32.

    Attributes:
        cos, sin: ``[..., head_dim]``, broadcast against ``[batch, tokens, heads, head_dim]``.
    """

    __slots__ = ("cos", "sin")

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        self.cos = cos
        self.sin = sin

    @classmethod
    def at(cls, positions: Tensor, head_dim: int, theta: float) -> Rotary:
        """Tables for ``positions`` of any shape; each gains a head axis and the ``head_dim`` axis."""
        exponent = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
        angles = positions.float()[..., None, None] * theta**-exponent
        cos, sin = angles.cos(), angles.sin()
        # The sine of the first half carries the sign of the rotation, so applying it takes no negation.
        return cls(torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1))

    def apply(self, heads: Tensor) -> Tensor:
        """Rotate float32 ``[batch, tokens, heads, head_dim]``."""
        half = heads.shape[-1] // 2
        return heads * self.cos + heads.roll(half, dims=-1) * self.sin


class TimestepEmbedder(nn.Module):
    """Sinusoids of the time through a two-layer perceptron.

    The time stays float32 until it has become sines and cosines: rounding 0.8333 to bfloat16 first would move
        it.
    """

    num_frequencies = 128
    max_period = 10_000.0

    def __init__(self, hidden_size: int, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.mlp = nn.Sequential(
            Linear(2 * self.num_frequencies, hidden_size), nn.SiLU(), Linear(hidden_size, hidden_size)
        )

    def frequencies(self, time: Tensor) -> Tensor:
        """float32 ``[N, 256]``: cosines then sines of ``time`` ``[N]``, in [0, 1]."""
        steps = torch.arange(self.num_frequencies, device=time.device, dtype=torch.float32)
        rates = torch.exp(steps * (-math.log(self.max_period) / self.num_frequencies))
        angles = (time.float() * self.scale)[:, None] * rates
        return torch.cat((angles.cos(), angles.sin()), dim=-1)

    def forward(self, time: Tensor) -> Tensor:
        """``[N]`` in [0, 1] to ``[N, hidden]`` in the weights' dtype."""
        return self.mlp(self.frequencies(time).to(self.mlp[0].weight.dtype))


class PositionEmbedding(nn.Module):
    """A fixed two-dimensional table; it is stored with the weights but never trained."""

    def __init__(self, side: int, hidden_size: int) -> None:
        super().__init__()
        self.side = side
        self.pos_embed = nn.Parameter(torch.empty(side * side, hidden_size), requires_grad=False)

    def reset_parameters(self) -> None:
        """Sinusoids of column (first half of the width) and row (second half)."""
        with torch.no_grad():
            self.pos_embed.copy_(sincos_table(self.side, self.pos_embed.shape[1]))

    def forward(self, position_ids: Tensor) -> Tensor:
        """Rows of the table: ``[..., hidden]``."""
        return self.pos_embed[position_ids]


def sincos_table(side: int, width: int) -> Tensor:
    """float32 ``[side * side, width]``: sines and cosines of the column, then of the row."""
    if width % 4:
        raise ValueError(f"a two-dimensional position table needs a width divisible by 4, not {width}")
    rates = 10_000.0 ** -(torch.arange(width // 4, dtype=torch.float64) / (width // 4))
    angles = torch.arange(side, dtype=torch.float64)[:, None] * rates
    line = torch.cat((angles.sin(), angles.cos()), dim=1)
    columns = line[None].expand(side, side, -1)
    rows = line[:, None].expand(side, side, -1)
    return torch.cat((columns, rows), dim=-1).reshape(side * side, width).float()


class Connector(nn.Module):
    """Vision features to the language model's width."""

    def __init__(self, vision_size: int, hidden_size: int) -> None:
        super().__init__()
        self.fc1 = Linear(vision_size, hidden_size)
        self.fc2 = Linear(hidden_size, hidden_size)

    def forward(self, features: Tensor) -> Tensor:
        """``[..., vision]`` to ``[..., hidden]``."""
        return self.fc2(F.gelu(self.fc1(features), approximate="tanh"))


def patchify(image: Tensor, patch: int) -> Tensor:
    """``[B, C, H, W]`` to ``[B, (H/p)(W/p), p*p*C]``: row by row; inside a patch pixels, then channels."""
    batch, channels, height, width = image.shape
    cells = image.reshape(batch, channels, height // patch, patch, width // patch, patch)
    return cells.permute(0, 2, 4, 3, 5, 1).reshape(batch, -1, patch * patch * channels)


def unpatchify(tokens: Tensor, grid: tuple[int, int], patch: int) -> Tensor:
    """The inverse of :func:`patchify`: ``[B, rows * columns, p*p*C]`` to ``[B, C, rows*p, columns*p]``."""
    batch, _, width = tokens.shape
    channels = width // (patch * patch)
    cells = tokens.reshape(batch, grid[0], grid[1], patch, patch, channels)
    return cells.permute(0, 5, 1, 3, 2, 4).reshape(batch, channels, grid[0] * patch, grid[1] * patch)
