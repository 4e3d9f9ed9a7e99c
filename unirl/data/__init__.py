# SPDX-License-Identifier: Apache-2.0
"""Prompt datasets, the sampler that cuts them into batches, and the requests made from them."""

from unirl.data.prompts import (
    BUILT_IN,
    CANVASES,
    LONGEST_PROMPT_BYTES,
    PromptDataset,
    PromptRow,
    check_prompt,
    load_dataset,
    load_file,
)
from unirl.data.requests import build_eval_request, build_request
from unirl.data.sampler import PromptSampler

__all__ = [
    "BUILT_IN",
    "CANVASES",
    "LONGEST_PROMPT_BYTES",
    "PromptDataset",
    "PromptRow",
    "PromptSampler",
    "build_eval_request",
    "build_request",
    "check_prompt",
    "load_dataset",
    "load_file",
]
