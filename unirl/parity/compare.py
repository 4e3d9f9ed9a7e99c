# SPDX-License-Identifier: Apache-2.0
"""Compares what a rollout worker gave its transformer with what the trainer's replay gave its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

_SHOWN_ROWS = 8
_SHOWN_CHARACTERS = 48
_DIGEST_FIELD = "source_pixels"


class LayoutMismatch(ValueError):  # noqa: N818 (a state of affairs, not a kind of error)
    """The worker and the trainer did not look at the same thing.

    `ids` are the rows concerned.
    """

    def __init__(self, message: str, ids: Sequence[str]) -> None:
        super().__init__(message, tuple(ids))
        self.ids = tuple(ids)

    def __str__(self) -> str:
        return str(self.args[0])


def mismatching_rows(worker: torch.Tensor, trainer: torch.Tensor) -> torch.Tensor:
    """bool `[N]` on the device of `trainer`, for digests int64 `[N, 2]`. Reads nothing back to the host."""
    if worker.shape != trainer.shape or worker.ndim != 2 or worker.shape[1] != 2:
        raise ValueError(
            f"fingerprints must be int64 [N, 2] on both sides; got {tuple(worker.shape)} and "
            f"{tuple(trainer.shape)}"
        )
    return (worker.to(trainer.device) != trainer).any(dim=1)


def compare(
    worker: torch.Tensor | None,
    trainer: torch.Tensor | None,
    ids: Sequence[str],
    *,
    require: bool = True,
    worker_fields: Sequence[Mapping[str, Any]] | None = None,
    trainer_fields: Sequence[Mapping[str, Any]] | None = None,
) -> None:
    """Raises `LayoutMismatch` when a row's digests differ; returns in silence when all agree.

    Args:
        worker, trainer: int64 `[N, 2]`, digests of what each side's transformer was given; None where a side
            gave none.
        ids: one a row.
        require: a missing digest is an error (key `parity.require_fingerprint`), otherwise nothing is
            compared.
        worker_fields, trainer_fields: what the digests were taken of, one mapping a row, where a side sends
            it: the error then holds a table field / worker / trainer instead of the digests.
    """
    missing = [
        side for side, value in (("the rollout worker", worker), ("the trainer", trainer)) if value is None
    ]
    if missing:
        if require:
            raise LayoutMismatch(
                f"no fingerprint of the token layout came from {' and '.join(missing)}, so nothing shows "
                "that both looked at the same "
                "tokens; use an engine that sends them, or set parity.require_fingerprint: false",
                ids,
            )
        return
    assert worker is not None and trainer is not None
    different = torch.nonzero(mismatching_rows(worker, trainer)).flatten().tolist()
    if not different:
        return
    lines: list[tuple[str, str, str, str]] = []
    for row in different[:_SHOWN_ROWS]:
        found: list[tuple[str, str, str]] = []
        if worker_fields is not None and trainer_fields is not None:
            found = differing_fields(worker_fields[row], trainer_fields[row])
        if not found:
            found = [("fingerprint", _hexadecimal(worker[row].tolist()), _hexadecimal(trainer[row].tolist()))]
        lines += [(ids[row], *line) for line in found]
    rest = len(different) - _SHOWN_ROWS
    raise LayoutMismatch(
        f"{len(different)} of {len(ids)} rows were laid out differently by the rollout worker and by the "
        "trainer, so their "
        "log-probs cannot be compared:\n"
        + table(("row", "field", "worker", "trainer"), lines)
        + (f"\n... and {rest} more rows" if rest > 0 else ""),
        [ids[row] for row in different],
    )


def differing_fields(worker: Mapping[str, Any], trainer: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """(field, worker's value, trainer's value) of every field that differs.

    A sequence of several values is told by its length, where the lengths differ, and by its first differing
    element; a sequence of one value like that value. 128-bit digests, pairs of numbers in a field whose last
    part is `source_pixels`, are told in hexadecimal, counted in pairs.
    """
    found: list[tuple[str, str, str]] = []
    for name in [*worker, *(n for n in trainer if n not in worker)]:
        left, right = (_plain(side.get(name)) for side in (worker, trainer))
        if left == right:
            continue
        if name.rsplit(".", 1)[-1] == _DIGEST_FIELD:
            left, right = _digests(left), _digests(right)
        if isinstance(left, list) and isinstance(right, list):
            found += _differing_elements(name, left, right)
        else:
            found.append((name, _shortened(left), _shortened(right)))
    return found


def _differing_elements(name: str, left: list[Any], right: list[Any]) -> list[tuple[str, str, str]]:
    found = []
    if len(left) != len(right):
        found.append((f"len({name})", str(len(left)), str(len(right))))
    at = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), None)
    if at is not None:
        single = len(left) == len(right) == 1
        found.append((name if single else f"{name}[{at}]", _shortened(left[at]), _shortened(right[at])))
    return found


def _digests(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    return [_hexadecimal(value[i : i + 2]) for i in range(0, len(value), 2)]


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    return list(value) if isinstance(value, tuple) else value


def _shortened(value: Any) -> str:
    text = "(none)" if value is None else str(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."


def _hexadecimal(words: Sequence[int]) -> str:
    return "".join(f"{word & 0xFFFFFFFFFFFFFFFF:016x}" for word in words)


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    widths = [max(len(line[i]) for line in (head, *lines)) for i in range(len(head))]
    return "\n".join(
        "  " + "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip()
        for line in (head, *lines)
    )
