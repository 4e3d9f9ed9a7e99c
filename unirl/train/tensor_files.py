# SPDX-License-Identifier: Apache-2.0
"""Safetensors files written one tensor at a time.

The format (github.com/huggingface/safetensors): the header's length as a little-endian 64-bit integer, a JSON
header with every tensor's dtype, shape and byte range, then the bytes. The header needs shapes only, so
nothing has to be in memory but the tensor being written.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open

DEFAULT_SHARD_BYTES = 4 << 30
_ALIGNMENT = 8
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclasses.dataclass(frozen=True)
class WrittenFile:
    """A file on disk: its name, its size in bytes and its blake2b digest (hexadecimal, 32 bytes)."""

    name: str
    size_bytes: int
    blake2b: str


def write_sharded(
    folder: Path,
    stem: str,
    tensors: Mapping[str, torch.Tensor],
    *,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> list[WrittenFile]:
    """Writes `<stem>.safetensors`, or `<stem>-00001-of-0000N.safetensors` where one shard would be too large,
    and fsyncs each.

    Tensors are read from the mapping one by one, when their turn comes, and on their way to disk only that
    one is copied (from a GPU, or when it is not contiguous).
    """
    shards = list(_shards(tensors, max_shard_bytes))
    many = len(shards) > 1
    return [
        _write(
            folder / (f"{stem}-{i:05d}-of-{len(shards):05d}.safetensors" if many else f"{stem}.safetensors"),
            tensors,
            names,
        )
        for i, names in enumerate(shards, start=1)
    ]


def read_tensors(folder: Path, names: list[str]) -> dict[str, torch.Tensor]:
    """All tensors of the named files."""
    tensors: dict[str, torch.Tensor] = {}
    for name in names:
        with safe_open(folder / name, framework="pt") as file:
            tensors.update({key: file.get_tensor(key) for key in file.keys()})  # noqa: SIM118
    return tensors


def file_digest(path: Path) -> str:
    """blake2b of a file, read in pieces."""
    digest = hashlib.blake2b(digest_size=32)
    with open(path, "rb") as file:
        while piece := file.read(1 << 22):
            digest.update(piece)
    return digest.hexdigest()


def write_bytes(path: Path, content: bytes) -> WrittenFile:
    """Writes and fsyncs a small file."""
    with open(path, "wb") as file:
        file.write(content)
        _flush(file)
    return WrittenFile(path.name, len(content), hashlib.blake2b(content, digest_size=32).hexdigest())


def sync_folder(folder: Path) -> None:
    """Makes a folder's entries durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _shards(tensors: Mapping[str, torch.Tensor], max_shard_bytes: int) -> Iterator[list[str]]:
    names: list[str] = []
    filled = 0
    for name in tensors:
        tensor = tensors[name]
        size = tensor.numel() * tensor.element_size()
        if names and filled + size > max_shard_bytes:
            yield names
            names, filled = [], 0
        names.append(name)
        filled += size
    yield names


def _write(path: Path, tensors: Mapping[str, torch.Tensor], names: list[str]) -> WrittenFile:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name in names:
        tensor = tensors[name]
        if tensor.dtype not in _DTYPES:
            raise ValueError(f"tensor {name} has dtype {tensor.dtype}, which safetensors files do not hold")
        end = start + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    digest = hashlib.blake2b(digest_size=32)
    size = 0
    with open(path, "wb") as file:
        for piece in _pieces(text, tensors, names):
            digest.update(piece)
            size += file.write(piece)
        _flush(file)
    return WrittenFile(path.name, size, digest.hexdigest())


def _pieces(
    header: bytes, tensors: Mapping[str, torch.Tensor], names: list[str]
) -> Iterator[bytes | memoryview]:
    yield len(header).to_bytes(8, "little")
    yield header
    for name in names:
        flat = tensors[name].detach().to("cpu").contiguous().reshape(-1)
        if flat.numel():
            yield flat.view(torch.uint8).numpy().data


def _flush(file: object) -> None:
    file.flush()  # type: ignore[attr-defined]
    os.fsync(file.fileno())  # type: ignore[attr-defined]
