# SPDX-License-Identifier: Apache-2.0
"""From dataset rows to a request: prompts with ids, and their siblings."""

from __future__ import annotations

from collections.abc import Sequence

from unirl.data.prompts import PromptDataset
from unirl.types import Part, Sample, SamplingParams


def build_request(
    dataset: PromptDataset, indices: Sequence[int], rollout_id: int, siblings: int, params: SamplingParams
) -> Sample:
    """A training request: prompt `k` of the batch is row `r{rollout_id}.p{k}`, its siblings
    `r{rollout_id}.p{k}/{j}`.

    Args:
        dataset: where the rows come from.
        indices: dataset rows of this batch, in order; a row may occur twice and is then two groups.
        rollout_id: number of the generation, unique in the run.
        siblings: rows generated a prompt (`samples_per_prompt`).
        params: how they are sampled.

    Returns: two Parts, prompts and siblings.
    """
    ids = tuple(f"r{rollout_id}.p{k}" for k in range(len(indices)))
    return _request(dataset, indices, ids, siblings, params)


def build_eval_request(
    dataset: PromptDataset, indices: Sequence[int], siblings: int, params: SamplingParams
) -> Sample:
    """An evaluation request: dataset row `k` is `eval.p{k}`, so its noise does not depend on how an
    evaluation is cut up.
    """
    return _request(dataset, indices, tuple(f"eval.p{k}" for k in indices), siblings, params)


def _request(
    dataset: PromptDataset,
    indices: Sequence[int],
    ids: tuple[str, ...],
    siblings: int,
    params: SamplingParams,
) -> Sample:
    rows = [dataset[index] for index in indices]
    prompts = Part(
        ids=ids,
        prompts=tuple(row.prompt for row in rows),
        metadata=tuple(row.metadata for row in rows),
        # A dataset that has images anywhere has the column everywhere, so that its requests can be
        # concatenated.
        images=tuple(row.image for row in rows) if dataset.has_images else None,
        params=params,
    )
    return Sample((prompts,)).fork(siblings, params)
