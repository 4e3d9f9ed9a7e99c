# SPDX-License-Identifier: Apache-2.0
"""Which rows of a dataset a rollout takes."""

from __future__ import annotations

import functools
import hashlib
from typing import Any


class PromptSampler:
    """Cuts an endless run of epochs into batches.

    Every epoch is a permutation of all rows, a function of (seed, epoch) alone. Batch `i` is the rows from `i
    * batch_size` on, across the end of an epoch where it falls there: nothing is skipped, and nothing comes
    again before its epoch is over.

    Args:
        dataset_len: rows in the dataset.
        batch_size: rows a batch; more than `dataset_len` is allowed, and repeats rows within a batch.
        seed: of the permutations.
        shuffle: False keeps the dataset's order in every epoch.
    """

    def __init__(self, dataset_len: int, batch_size: int, seed: int, shuffle: bool = True) -> None:
        if dataset_len < 1:
            raise ValueError(
                f"the dataset has {dataset_len} rows; allowed: 1 or more "
                "(keys data.train.name, data.train.path)"
            )
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; allowed: 1 or more")
        self.dataset_len = dataset_len
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.next_index = 0

    def batch(self, index: int) -> list[int]:
        """Row numbers of batch `index`, counted from 0; the same whenever and wherever it is asked for."""
        if index < 0:
            raise ValueError(f"batch index is {index}; allowed: 0 or more")
        start = index * self.batch_size
        return [self._row(position) for position in range(start, start + self.batch_size)]

    def take(self) -> list[int]:
        """The batch at the cursor, which moves on."""
        rows = self.batch(self.next_index)
        self.next_index += 1
        return rows

    def state_dict(self) -> dict[str, Any]:
        """The cursor, and what the batches depend on."""
        return {"next_index": self.next_index, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes the cursor over. `ValueError` when the saved batches were cut from something else."""
        for name, value in self._identity().items():
            if state[name] != value:
                raise ValueError(
                    f"the checkpoint's data cursor was saved with {name} {state[name]!r}, this run "
                    f"has {value!r}: prompts would be skipped or repeated; set it back or drop resume"
                )
        self.next_index = state["next_index"]

    def _identity(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("dataset_len", "batch_size", "seed", "shuffle")}

    def _row(self, position: int) -> int:
        epoch, offset = divmod(position, self.dataset_len)
        return _permutation(self.seed, epoch, self.dataset_len)[offset] if self.shuffle else offset


@functools.lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, length: int) -> tuple[int, ...]:
    """Rows sorted by a hash: no random generator whose stream a library's next release might change."""

    def rank(row: int) -> bytes:
        return hashlib.blake2b(f"{seed}:{epoch}:{row}".encode(), digest_size=16).digest()

    return tuple(sorted(range(length), key=rank))
