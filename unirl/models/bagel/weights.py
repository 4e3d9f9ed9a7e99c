# SPDX-License-Identifier: Apache-2.0
"""Weights as safetensors under the public checkpoint's tensor names, in one file or in indexed shards."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from unirl.models.bagel.config import BagelConfig
from unirl.models.bagel.model import Bagel

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILES = ("model.safetensors", "ema.safetensors")
"""Names a single weight file may have; the second is the public checkpoint's."""

DEFAULT_SHARD_BYTES = 5 * 1024**3


def save_weights(
    module: nn.Module, folder: str | Path, *, max_shard_bytes: int = DEFAULT_SHARD_BYTES
) -> list[Path]:
    """Write all parameters, in ``model.safetensors`` or in numbered shards with an index.

    One shard at a time is brought to the host, and nothing else is copied.

    Returns:
        The files written, the index last when there is one.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[list[str]] = [[]]
    tensors = dict(module.named_parameters())
    filled = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if shards[-1] and filled + size > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    written: list[Path] = []
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file_name = (
            SINGLE_FILES[0] if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        )
        shard = {name: tensors[name].detach().cpu().contiguous() for name in names}
        save_file(shard, folder / file_name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(names, file_name))
        written.append(folder / file_name)
    if len(shards) > 1:
        total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
        written.append(folder / INDEX_FILE)
    return written


def check_weights(module: nn.Module, path: str | Path) -> None:
    """Whether the tensors at ``path`` are those of ``module``, by the files' headers alone; ``module`` may be on meta.

    Raises:
        ValueError: a missing file, an unreadable one, or tensors that are missing, unexpected or of another shape;
            the message names the path and the tensors.
    """
    _tensor_files(module, Path(path))


def load_weights(
    module: nn.Module,
    path: str | Path,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
) -> None:
    """Read a checkpoint into ``module``, tensor by tensor; parameters on the meta device are created.

    Args:
        path: a ``.safetensors`` file, or a folder with one or with shards and their index.
        device: where created parameters go; existing ones stay where they are.
        dtype: dtype of created parameters, by default the file's.

    Raises:
        ValueError: as :func:`check_weights`.
    """
    found = _tensor_files(module, Path(path))
    parameters = dict(module.named_parameters())
    for file in dict.fromkeys(found.values()):
        with _opened(file) as handle:
            for name in handle.keys():  # noqa: SIM118 (safe_open is no mapping)
                if found[name] == file:
                    _install(module, name, parameters[name], handle.get_tensor(name), device, dtype)


def _tensor_files(module: nn.Module, path: Path) -> dict[str, Path]:
    """Which file holds which tensor, after checking names and shapes against the module's."""
    parameters = dict(module.named_parameters())
    found: dict[str, Path] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for file in _weight_files(path):
        with _opened(file) as handle:
            for name in handle.keys():  # noqa: SIM118
                found[name] = file
                shapes[name] = tuple(handle.get_slice(name).get_shape())
    problems = [
        _listed("missing", (name for name in parameters if name not in found)),
        _listed("unexpected", (name for name in found if name not in parameters)),
        _listed(
            "of another shape",
            (
                f"{name} (file {list(shapes[name])}, model {list(parameters[name].shape)})"
                for name in found
                if name in parameters and shapes[name] != tuple(parameters[name].shape)
            ),
        ),
    ]
    if any(problems):
        raise ValueError(
            f"{path} does not fit the model: {'; '.join(problem for problem in problems if problem)}"
        )
    return found


def load_model(
    path: str | Path,
    config: BagelConfig | None = None,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Bagel:
    """A model with the weights and, unless ``config`` is given, the configuration of a checkpoint folder."""
    config = BagelConfig.load(path) if config is None else config
    with torch.device("meta"):
        model = Bagel(config)
    load_weights(model, path, device=device, dtype=dtype)
    return model.eval()


def save_model(model: Bagel, folder: str | Path, *, max_shard_bytes: int = DEFAULT_SHARD_BYTES) -> None:
    """Write weights and configuration as a folder that :func:`load_model` reads."""
    save_weights(model, folder, max_shard_bytes=max_shard_bytes)
    model.config.save(folder)


def _weight_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ValueError(f"no weights at {path}: there is no such file or folder")
    index = path / INDEX_FILE
    if index.is_file():
        files = [path / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    else:
        files = [path / name for name in SINGLE_FILES if (path / name).is_file()][:1]
        if not files:
            raise ValueError(f"no weights in {path}: expected {INDEX_FILE} or {' or '.join(SINGLE_FILES)}")
    for file in files:
        if not file.is_file():
            raise ValueError(f"{index} names {file.name}, which is not in {path}")
    return files


def _opened(file: Path) -> safe_open:
    try:
        return safe_open(str(file), framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is no readable safetensors file: {error}") from error


def _listed(what: str, names: Iterable[str], most: int = 10) -> str:
    listed = list(names)
    if not listed:
        return ""
    rest = f" and {len(listed) - most} more" if len(listed) > most else ""
    return f"{what}: {', '.join(listed[:most])}{rest}"


def _install(
    module: nn.Module,
    name: str,
    parameter: nn.Parameter,
    tensor: torch.Tensor,
    device: str | torch.device,
    dtype: torch.dtype | None,
) -> None:
    if not parameter.is_meta:
        with torch.no_grad():
            parameter.copy_(tensor)
        return
    owner, _, leaf = name.rpartition(".")
    created = tensor.to(device=device, dtype=tensor.dtype if dtype is None else dtype, copy=True)
    setattr(module.get_submodule(owner), leaf, nn.Parameter(created, requires_grad=parameter.requires_grad))
