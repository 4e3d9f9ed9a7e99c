# SPDX-License-Identifier: Apache-2.0
"""128-bit digests of integer rows and of tensors: sensitive to order, shape, dtype and every bit of the
values.

Construction. The bytes are read as 64-bit words (little endian, the last one filled with zeros), in tiles of
128 words. Inside a tile each word ``x`` meets one key word ``k`` per lane and adds
``(low32(x) + low32(k)) * (high32(x) + high32(k))`` to the lane (the NH function of UMAC, Black, Halevi,
Krawczyk, Krovetz, Rogaway, CRYPTO 1999), four lanes in all, with the keys of lane ``j`` shifted by ``j``
words (Toeplitz). The lanes of a tile are mixed with the tile's index, the mixed values of all tiles are added
modulo 2^64, and a header (length for rows; dtype and shape for tensors) is mixed in last. Every sum wraps,
so that any order of summation, on any device and launch grid, gives the same bits. It guards against
mistakes, not against an adversary.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from unirl.ops import _arguments as arguments
from unirl.ops import _backends
from unirl.ops.noise import _as_signed, _mix64, _shift_right

TILE_WORDS = 128
NUM_LANES = 4
_LOW_32 = 0xFFFFFFFF
_GOLDEN = 0x9E3779B97F4A7C15
_TILE_SALTS = (0xD6E8FEB86659FD93, 0xA0761D6478BD642F)
_LENGTH_SALTS = (0xE7037ED1A0B428DB, 0x8EBC6AF09C88C6E3)


def layout_digest(
    values: Tensor, offsets: Tensor | Sequence[int] | None = None, *, backend: str | None = None
) -> Tensor:
    """Digest every row of ``values``; equal rows give equal digests, wherever they stand and however stored.

    Args:
        values: int64 ``[N, F]``, or ``[M]`` with ``offsets``.
        offsets: int64 ``[N + 1]``, rising from 0 to M: row ``i`` is ``values[offsets[i]:offsets[i + 1]]``.
        backend: ``None`` (picked by device), ``"native"`` or ``"reference"``.

    Returns:
        int64 ``[N, 2]`` on the device of ``values``. A row's digest covers its length and its values in
        order, and is the same in both forms.

    Raises:
        ValueError: a dtype other than int64, a wrong number of axes, offsets that are not rising from 0 to M.
    """
    arguments.check_tensor("values", values)
    arguments.check_dtype("values", values, (torch.int64,))
    expected = 2 if offsets is None else 1
    if values.ndim != expected:
        raise ValueError(f"values has {values.ndim} axes; expected [N, F], or [M] with offsets")
    bounds = None if offsets is None else torch.tensor(check_offsets(offsets, values.shape[0]))
    if _backends.pick("digest", values.device, backend) == _backends.REFERENCE:
        return layout_digest_rows_reference(values, bounds)
    return torch.ops.unirl.layout_digest(values, bounds)


def check_offsets(offsets: Tensor | Sequence[int], num_values: int) -> list[int]:
    """Return ``offsets`` as a list of ints after checking that they rise from 0 to ``num_values``."""
    bounds = arguments.integers("offsets", offsets)
    if not bounds or bounds[0] != 0 or bounds[-1] != num_values:
        raise ValueError(
            f"offsets must start with 0 and end with the number of values, {num_values}; got "
            + (f"{bounds[0]} and {bounds[-1]}" if bounds else "none")
        )
    for low, high in itertools.pairwise(bounds):
        if high < low:
            raise ValueError(f"offsets must not fall; {high} follows {low}")
    return bounds


def tensor_digest(tensors: Sequence[Tensor], *, backend: str | None = None) -> Tensor:
    """Digest each of ``tensors``: the bits of its values in row-major order, its shape and its dtype.

    Strides, device and memory address do not enter. +0 and -0 differ, and so do two NaNs of different
    payload.

    Args:
        tensors: M tensors of one device; strided ones are read through a contiguous copy.
        backend: ``None`` (picked by device), ``"native"`` or ``"reference"``.

    Returns:
        int64 ``[M, 2]`` on the tensors' device (the CPU when there are none).
    """
    if isinstance(tensors, Tensor) or not isinstance(tensors, Iterable):
        raise ValueError(f"tensors is one {type(tensors).__name__}; expected a list of tensors")
    tensors = list(tensors)
    if not tensors:
        return torch.zeros((0, 2), dtype=torch.int64)
    arguments.check_tensor("tensors[0]", tensors[0])
    device = tensors[0].device
    for index, tensor in enumerate(tensors):
        # A state dict has hundreds of tensors and a GPU waits meanwhile: names are made for an error alone.
        if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided or tensor.device != device:
            arguments.check_tensor(f"tensors[{index}]", tensor)
            arguments.check_device(f"tensors[{index}]", tensor, device, "tensors[0]")
    if _backends.pick("digest", device, backend) == _backends.REFERENCE:
        return torch.stack([tensor_digest_reference(tensor) for tensor in tensors])
    return torch.ops.unirl.tensor_digest(tensors)


def tensor_header(tensor: Tensor) -> tuple[int, int]:
    """Return the two signed header words of a tensor: BLAKE2b of its dtype's name and its shape."""
    return _header(tensor.dtype, tensor.shape)


@functools.lru_cache(maxsize=4096)
def _header(dtype: torch.dtype, shape: torch.Size) -> tuple[int, int]:
    text = f"{str(dtype).removeprefix('torch.')}|{','.join(str(size) for size in shape)}"
    digest = hashlib.blake2b(text.encode("ascii"), digest_size=16).digest()
    return (
        int.from_bytes(digest[:8], "little", signed=True),
        int.from_bytes(digest[8:], "little", signed=True),
    )


def _keys(device: torch.device) -> Tensor:
    """The key words ``[131]``: SplitMix64 outputs of the states 1, 2, ..."""
    num_keys = TILE_WORDS + NUM_LANES - 1
    states = torch.arange(1, num_keys + 1, dtype=torch.int64, device=device) * _as_signed(_GOLDEN)
    return _mix64(states)


def _mixed_tiles(words: Tensor, tile_index: Tensor) -> tuple[Tensor, Tensor]:
    """Return the two mixed sums ``[R]`` of ``R`` tiles ``[R, W <= 128]`` with indices ``[R]`` (or one for
    all).
    """
    keys = _keys(words.device)
    low, high = words & _LOW_32, _shift_right(words, 32)
    lanes = []
    for lane in range(NUM_LANES):
        key = keys[lane : lane + words.shape[1]]
        left = (low + (key & _LOW_32)) & _LOW_32
        right = (high + _shift_right(key, 32)) & _LOW_32
        lanes.append((left * right).sum(1))
    salts = [(tile_index + 1) * _as_signed(salt) for salt in _TILE_SALTS]
    return _mix64(_mix64(lanes[0] + salts[0]) + lanes[2]), _mix64(_mix64(lanes[1] + salts[1]) + lanes[3])


def layout_digest_rows_reference(values: Tensor, offsets: Tensor | None) -> Tensor:
    """The plain PyTorch digest of ``[N, F]``, or of ``[M]`` cut at ``offsets``; int64 ``[N, 2]``."""
    if offsets is None:
        return layout_digest_reference(values)
    bounds = offsets.tolist()
    rows = [
        layout_digest_reference(values[low:high].unsqueeze(0)) for low, high in itertools.pairwise(bounds)
    ]
    return torch.cat(rows) if rows else values.new_zeros((0, 2))


def layout_digest_reference(values: Tensor) -> Tensor:
    """The plain PyTorch digest of the rows of int64 ``[N, F]``; int64 ``[N, 2]``."""
    num_rows, num_words = values.shape
    sums = [values.new_zeros(num_rows), values.new_zeros(num_rows)]
    for tile, start in enumerate(range(0, num_words, TILE_WORDS)):
        index = torch.tensor(tile, dtype=torch.int64, device=values.device)
        mixed = _mixed_tiles(values[:, start : start + TILE_WORDS], index)
        sums = [total + term for total, term in zip(sums, mixed, strict=True)]
    length = torch.tensor(num_words + 1, dtype=torch.int64, device=values.device)
    headers = [_mix64(length * _as_signed(salt)) for salt in _LENGTH_SALTS]
    return torch.stack([_mix64(total + word) for total, word in zip(sums, headers, strict=True)], dim=1)


def tensor_digest_reference(tensor: Tensor) -> Tensor:
    """The plain PyTorch digest of one tensor; int64 ``[2]``."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    data = flat.view(torch.uint8) if flat.numel() else torch.zeros(0, dtype=torch.uint8, device=flat.device)
    words = F.pad(data, (0, -data.numel() % 8)).view(torch.int64)
    num_full = words.numel() // TILE_WORDS
    whole, rest = (
        words[: num_full * TILE_WORDS].view(-1, TILE_WORDS),
        words[num_full * TILE_WORDS :].view(1, -1),
    )
    indices = torch.arange(num_full + 1, dtype=torch.int64, device=flat.device)
    sums = [mixed.sum() for mixed in _mixed_tiles(whole, indices[:num_full])]
    if rest.numel():
        sums = [
            total + term.sum()
            for total, term in zip(sums, _mixed_tiles(rest, indices[num_full:]), strict=True)
        ]
    words_of_header = tensor_header(tensor)
    return torch.stack([_mix64(total + word) for total, word in zip(sums, words_of_header, strict=True)])
