# SPDX-License-Identifier: Apache-2.0
"""`samples/eval_<step>.npz`.

The images of an evaluation with their prompts, row ids and scores, canvases mixed or not.
"""

from __future__ import annotations

import dataclasses
import os
import re
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

_CANVAS_KEY = re.compile(r"images_(\d+)x(\d+)")


@dataclasses.dataclass(frozen=True)
class SampleSet:
    """N images in row order.

    Attributes:
        images: N arrays uint8 `[H, W, C]`, C 1 or 3; sizes may differ.
        prompts: N texts.
        ids: N row ids.
        scores: N numbers, NaN where there is none.
    """

    images: tuple[np.ndarray, ...]
    prompts: tuple[str, ...]
    ids: tuple[str, ...]
    scores: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.images)


def write_samples(
    path: str | os.PathLike[str],
    images: Sequence[np.ndarray],
    prompts: Sequence[str],
    ids: Sequence[str],
    scores: Sequence[float],
) -> Path:
    """Stores N images (uint8, or float in [0, 1]; `[H, W]` or `[H, W, C]`) with what is known of them.

    Keys of the npz: `images` uint8 `[N, H, W, C]` when all have one canvas, otherwise for each canvas
    `images_<H>x<W>` and `rows_<H>x<W>` (the rows' positions); `prompts`, `ids` text `[N]`; `scores` float64
    `[N]`. Nothing is pickled. Written to a temporary name first, so that a reader never sees half a file.
    Raises `ValueError` when the lengths differ.
    """
    lengths = {"images": len(images), "prompts": len(prompts), "ids": len(ids), "scores": len(scores)}
    if len(set(lengths.values())) != 1:
        raise ValueError(f"samples have {lengths}; allowed: one prompt, id and score an image")
    arrays: dict[str, np.ndarray] = {
        "prompts": np.asarray(list(prompts), dtype=np.str_),
        "ids": np.asarray(list(ids), dtype=np.str_),
        "scores": np.asarray(list(scores), dtype=np.float64),
    }
    by_canvas: dict[tuple[int, int], list[int]] = {}
    pixels = [to_uint8(image) for image in images]
    for row, image in enumerate(pixels):
        by_canvas.setdefault((image.shape[0], image.shape[1]), []).append(row)
    if len(by_canvas) == 1:
        arrays["images"] = np.stack(pixels)
    else:
        for (height, width), rows in by_canvas.items():
            arrays[f"images_{height}x{width}"] = np.stack([pixels[row] for row in rows])
            arrays[f"rows_{height}x{width}"] = np.asarray(rows, dtype=np.int64)
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.tmp.npz")
    np.savez_compressed(temporary, **arrays)  # type: ignore[arg-type]
    temporary.replace(target)
    return target


def read_samples(path: str | os.PathLike[str]) -> SampleSet:
    """What `write_samples` stored. Raises `ValueError`, naming the file, when it is not such a file."""
    damaged = ValueError(
        f"{path} is no readable npz of samples: it is cut short or altered; remove or restore it"
    )
    if os.path.exists(path) and not zipfile.is_zipfile(path):
        raise damaged
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except FileNotFoundError:
        raise
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise damaged from error
    canvases = [
        match[0].replace("images", "rows") for name in arrays if (match := _CANVAS_KEY.fullmatch(name))
    ]
    missing = [name for name in ("prompts", "ids", "scores", *canvases) if name not in arrays]
    if missing:
        raise ValueError(f"{path} has no {', '.join(missing)}; it holds {sorted(arrays)}")
    num_rows = len(arrays["prompts"])
    images: list[np.ndarray | None] = [None] * num_rows
    for name, stack, rows in _stacks(arrays):
        if len(stack) != len(rows) or (len(rows) and int(rows.max()) >= num_rows):
            raise ValueError(f"{path}: {name} has {len(stack)} images for {len(rows)} of {num_rows} rows")
        for row, image in zip(rows, stack, strict=True):
            images[int(row)] = image
    if any(image is None for image in images):
        raise ValueError(f"{path}: {sum(image is None for image in images)} of {num_rows} rows have no image")
    return SampleSet(
        images=tuple(image for image in images if image is not None),
        prompts=tuple(str(prompt) for prompt in arrays["prompts"]),
        ids=tuple(str(row_id) for row_id in arrays["ids"]),
        scores=tuple(float(score) for score in arrays["scores"]),
    )


def _stacks(arrays: dict[str, np.ndarray]) -> list[tuple[str, np.ndarray, np.ndarray]]:
    found = []
    if "images" in arrays:
        found.append(("images", arrays["images"], np.arange(len(arrays["images"]))))
    for name, stack in arrays.items():
        match = _CANVAS_KEY.fullmatch(name)
        if match:
            found.append((name, stack, arrays[f"rows_{match[1]}x{match[2]}"]))
    return found


def to_uint8(image: np.ndarray) -> np.ndarray:
    """uint8 `[H, W, C]` of an image that is uint8, or float in [0, 1]; values outside are clipped."""
    array = np.asarray(image)
    if array.ndim == 2:
        array = array[..., None]
    if array.ndim != 3 or array.shape[2] not in (1, 3):
        raise ValueError(
            f"an image has shape {np.asarray(image).shape}; allowed: [H, W], [H, W, 1] or [H, W, 3]"
        )
    if array.dtype == np.uint8:
        return array
    finite = np.nan_to_num(array.astype(np.float64), nan=0.0, posinf=1.0, neginf=0.0)
    return np.round(np.clip(finite, 0.0, 1.0) * 255).astype(np.uint8)
