# SPDX-License-Identifier: Apache-2.0
"""The process's random states as tensors, so that a checkpoint holds them without pickle.

Training itself draws nothing from them: noise is keyed and shuffles are functions of the seed. They are kept
for what a user's own scorer or stage may draw.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def rng_tensors() -> dict[str, torch.Tensor]:
    """`torch_cpu`, `torch_cuda:<i>` (uint8), `python`, `numpy` (int64; numpy's legacy global generator)."""
    version, words, gauss = random.getstate()
    legacy: dict[str, Any] = np.random.get_state(legacy=False)
    words_of_numpy = legacy["state"]
    tensors = {
        "torch_cpu": torch.get_rng_state(),
        "python": torch.tensor([version, *words], dtype=torch.int64),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy": torch.tensor([words_of_numpy["pos"], legacy["has_gauss"], *words_of_numpy["key"].tolist()]),
        "numpy_gauss": torch.tensor([legacy["gauss"]], dtype=torch.float64),
    }
    if torch.cuda.is_available():
        tensors |= {f"torch_cuda:{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    return tensors


def load_rng(tensors: Mapping[str, torch.Tensor]) -> None:
    """Puts the states back. States of GPUs that this process does not have are left out."""
    torch.set_rng_state(tensors["torch_cpu"].clone())
    version, *words = tensors["python"].tolist()
    gauss = tensors["python_gauss"].tolist()
    random.setstate((version, tuple(words), gauss[0] if gauss else None))
    position, has_gauss, *keys = tensors["numpy"].tolist()
    np.random.set_state(
        ("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, float(tensors["numpy_gauss"][0]))
    )
    for i in range(torch.cuda.device_count()):
        if (state := tensors.get(f"torch_cuda:{i}")) is not None:
            torch.cuda.set_rng_state(state.clone(), i)
