# SPDX-License-Identifier: Apache-2.0
"""Prompt datasets: a text file, a jsonl file, or one of the built-in digit sets.

A `.txt` file holds a prompt a line. A `.jsonl` file holds an object a line:

| key | type | |
|---|---|---|
| `prompt` | string, not empty, at most 16384 bytes | required |
| `metadata` | object | optional; for the scorers; `canvas: [height, width]` (pixels) sets the row's size |
| `image` | string | optional; source image of an image-to-image row, a path relative to the jsonl file |

Both are UTF-8; blank lines are skipped. Every problem is a `ValueError` that names the file and the line.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from unirl import digits
from unirl.config import DatasetConfig
from unirl.types import Canvas

CANVASES = ((8, 8), (12, 12), (12, 8))
"""Height and width of the canvases in `digits_mixed`, and those the digits base is trained on."""

LONGEST_PROMPT_BYTES = 16384
"""Of a prompt, as UTF-8. Tokenizers make no more tokens than there are bytes, so that bounds its tokens too: at half of the 32768
positions that the public BAGEL-7B was made for."""

_KEYS = ("prompt", "metadata", "image")
_NUM_EDIT_SOURCES = 30


@dataclasses.dataclass(frozen=True)
class PromptRow:
    """One row of a dataset.

    Attributes:
        image: source image, uint8 `[H, W, 1]` or `[H, W, 3]`, or None.
    """

    prompt: str
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    image: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class _StoredRow:
    prompt: str
    metadata: Mapping[str, Any]
    image: np.ndarray | Path | None


class PromptDataset:
    """Rows in their file's order. Source images are read from their files when their row is asked for.

    Attributes:
        name: where the rows come from, for messages.
        has_images: whether any row has a source image.
    """

    def __init__(self, name: str, rows: Sequence[_StoredRow]) -> None:
        self.name = name
        self._rows = tuple(rows)
        self.has_images = any(row.image is not None for row in self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> PromptRow:
        row = self._rows[index]
        image = _read_image(row.image) if isinstance(row.image, Path) else row.image
        return PromptRow(row.prompt, row.metadata, image)

    def without_images(self) -> PromptDataset:
        """The same rows, but no source image is read when a row is asked for."""
        return PromptDataset(self.name, [dataclasses.replace(row, image=None) for row in self._rows])

    def __iter__(self) -> Iterator[PromptRow]:
        return (self[index] for index in range(len(self)))


def load_dataset(config: DatasetConfig, key: str = "data.train") -> PromptDataset:
    """The dataset a recipe asks for.

    Args:
        config: `name` or `path`, exactly one of them.
        key: the recipe's section, for messages.

    Raises:
        ValueError: neither or both given, an unknown name, a file that is missing or holds a bad row.
    """
    if config.name is not None and config.path is not None:
        raise ValueError(
            f"{key} has both name {config.name!r} and path {config.path!r}; unset one of them: "
            f"{key}.name=null or {key}.path=null"
        )
    if config.name is None and config.path is None:
        raise ValueError(
            f"{key} has neither name nor path; set exactly one: name (one of {', '.join(BUILT_IN)}) or path"
        )
    if config.name is not None:
        if config.name not in BUILT_IN:
            close = difflib.get_close_matches(config.name, BUILT_IN, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"{key}.name is {config.name!r}; allowed: {', '.join(BUILT_IN)}{hint}")
        return PromptDataset(config.name, BUILT_IN[config.name]())
    path = Path(str(config.path))
    if path.suffix not in (".txt", ".jsonl"):
        raise ValueError(
            f"{key}.path is {config.path!r}; allowed: a .txt file (a prompt a line) or a .jsonl file"
        )
    if not path.is_file():
        raise ValueError(f"{key}.path: no file {str(path)!r}; change {key}.path")
    return load_file(path)


def load_file(path: Path) -> PromptDataset:
    """The rows of a `.txt` or `.jsonl` file; see the module's table. `ValueError` names file and line."""
    parse = _parse_jsonl if path.suffix == ".jsonl" else _parse_text
    rows: list[_StoredRow] = []
    for number, raw in enumerate(path.read_bytes().split(b"\n"), start=1):
        where = f"{path}, line {number}"
        try:
            line = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{where}: not UTF-8 text ({error.reason} at byte {error.start} of the line)"
            ) from error
        if line:
            rows.append(parse(line, path.parent, where))
    if not rows:
        raise ValueError(f"{path}: no prompts in it; allowed: at least one non-blank line")
    return PromptDataset(str(path), rows)


def check_prompt(prompt: str, where: str) -> None:
    """Raises `ValueError`, naming `where` it stood, for a prompt of more than `LONGEST_PROMPT_BYTES`."""
    num_bytes = len(prompt.encode("utf-8", errors="replace"))
    if num_bytes > LONGEST_PROMPT_BYTES:
        raise ValueError(
            f"{where}: the prompt has {num_bytes} bytes; allowed: at most {LONGEST_PROMPT_BYTES}; shorten it"
        )


def _parse_text(line: str, folder: Path, where: str) -> _StoredRow:
    check_prompt(line, where)
    return _StoredRow(line, {}, None)


def _parse_jsonl(line: str, folder: Path, where: str) -> _StoredRow:
    try:
        row = json.loads(line)
        json.dumps(row, ensure_ascii=False).encode("utf-8")
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{where}: not JSON ({error.msg} at column {error.colno}); allowed: one object a line"
        ) from error
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{where}: half of a surrogate pair, {error.object[error.start]!a}; allowed: Unicode text"
        ) from error
    # Nesting that exhausts the parser's stack, integers of thousands of digits.
    except (RecursionError, ValueError) as error:
        raise ValueError(
            f"{where}: not a row that can be read ({error}); allowed: one object a line"
        ) from error
    if not isinstance(row, dict):
        raise ValueError(f'{where}: {_shown(row)} is not an object; allowed: {{"prompt": ..., ...}}')
    for name in row:
        if name not in _KEYS:
            close = difflib.get_close_matches(name, _KEYS, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"{where}: unknown key {name!r}; allowed: {', '.join(_KEYS)}{hint}")
    text = row.get("prompt")
    if not isinstance(text, str) or not text.strip():
        shown = _shown(text) if "prompt" in row else "missing"
        raise ValueError(f"{where}: prompt is {shown}; allowed: a non-empty string")
    check_prompt(text, where)
    metadata = {} if row.get("metadata") is None else row["metadata"]
    if not isinstance(metadata, dict):
        raise ValueError(f"{where}: metadata is {_shown(metadata)}; allowed: an object")
    if metadata.get("canvas") is not None:
        Canvas.parse(metadata["canvas"], where)
    return _StoredRow(text, metadata, _image_path(row.get("image"), folder, where))


def _image_path(value: Any, folder: Path, where: str) -> Path | None:
    if value is None:
        return None
    if not isinstance(value, str) or not value:
        raise ValueError(f"{where}: image is {_shown(value)}; allowed: a path relative to the jsonl file")
    path = folder / value
    if not _is_file(path):
        raise ValueError(
            f"{where}: image {value[:200]!r} is not a file (looked for {path}); allowed: a path "
            "relative to the jsonl file"
        )
    try:
        _read_image(path)  # in full: whether a JPEG is cut short shows only when it is decoded
    # Pillow's decoders raise many kinds; whatever they say, what matters is the line of the unreadable row.
    except Exception as error:
        raise ValueError(
            f"{where}: image {value!r} cannot be read ({error}); allowed: an image file that Pillow opens"
        ) from error
    return path


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # such as a name that is too long
        return False


def _read_image(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        grey = image.mode in ("1", "L")
        pixels = np.asarray(image.convert("L" if grey else "RGB"), dtype=np.uint8)
    return pixels[..., None] if grey else pixels


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _digit_rows(phrasings: Sequence[str], canvases: Sequence[tuple[int, int]] = ()) -> list[_StoredRow]:
    """Phrasing by phrasing, digit by digit: ten rows in a row name all ten digits."""
    rows = []
    for p, phrasing in enumerate(phrasings):
        for digit in range(10):
            metadata: dict[str, Any] = {"digit": digit}
            if canvases:
                metadata["canvas"] = list(canvases[(digit + p) % len(canvases)])
            rows.append(_StoredRow(digits.prompt(digit, phrasing), metadata, None))
    return rows


def _edit_rows() -> list[_StoredRow]:
    """Scans of half A, each with a request for another digit."""
    scans = digits.half_a()
    rows = []
    for index in range(_NUM_EDIT_SOURCES):
        source, digit = int(scans.labels[index]), index % 10
        if digit == source:
            digit = (digit + 5) % 10
        image = np.round(digits.render(scans.images[index], (digits.SIDE, digits.SIDE)) * 255).astype(
            np.uint8
        )
        phrasing = digits.EDIT_PHRASINGS[index // 10 % len(digits.EDIT_PHRASINGS)]
        rows.append(
            _StoredRow(digits.prompt(digit, phrasing), {"digit": digit, "source_digit": source}, image)
        )
    return rows


BUILT_IN: Mapping[str, Callable[[], list[_StoredRow]]] = {
    "digits": lambda: _digit_rows(digits.PHRASINGS),
    "digits_heldout": lambda: _digit_rows((digits.HELD_OUT_PHRASING,)),
    "digits_mixed": lambda: _digit_rows(digits.PHRASINGS, CANVASES),
    "digits_edit": _edit_rows,
}
"""Names that `data.train.name` and `data.eval.name` may have."""
