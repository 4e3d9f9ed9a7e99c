# SPDX-License-Identifier: Apache-2.0
"""Models the tests share: the tiny one of the golden vectors, and the digits model with random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from unirl.models.bagel import (
    Bagel,
    BagelConfig,
    ContextRequest,
    SourceImage,
    load_weights,
    plan_layout,
    preset,
)
from unirl.models.bagel.config import BAGEL_7B_MOT, LanguageConfig, SpecialTokens, VisionConfig

GOLDEN = Path(__file__).parents[2] / "golden"
MODES = ("t2i", "it2i")


class Golden(NamedTuple):
    """The reference implementation's small random model, its inputs and what it computed."""

    facts: dict[str, Any]
    vectors: dict[str, Tensor]
    model: Bagel

    def request(self, mode: str) -> ContextRequest:
        """The request behind the vectors called ``t2i.*`` or ``it2i.*``."""
        facts, sizes, source = self.facts, None, None
        if mode == "it2i":
            sizes = (tuple(facts["source_vae_size"]), tuple(facts["source_vit_size"]))
            source = SourceImage(
                self.vectors["in.source_vae_latent"][0], self.vectors["in.source_vit_pixels"], "source"
            )
        layout = plan_layout(self.model.config, facts["prompt_ids"], tuple(facts["canvas"]), sizes)
        return ContextRequest(layout, source)


def golden_config(facts: dict[str, Any]) -> BagelConfig:
    """The golden model's dimensions."""
    unused = ("qk_norm", "tie_word_embeddings", "hidden_act")
    language = {key: value for key, value in facts["llm_config"].items() if key not in unused}
    vision = {key: value for key, value in facts["vit_config"].items() if key != "image_size"}
    side = facts["vit_max_num_patch_per_side"]
    return BagelConfig(
        language=LanguageConfig(**language),
        vision=VisionConfig(**vision, num_positions=side**2),
        latent=BAGEL_7B_MOT.latent,
        source=BAGEL_7B_MOT.source,
        tokens=SpecialTokens(**facts["tokens"]),
        latent_patch_size=facts["latent_patch_size"],
        max_latent_size=facts["max_latent_size"],
        vit_max_num_patch_per_side=side,
    )


@pytest.fixture(scope="session")
def golden() -> Golden:
    """The golden model, frozen."""
    torch.set_num_threads(1)
    facts = json.loads((GOLDEN / "bagel_tiny.json").read_text())
    with torch.device("meta"):
        model = Bagel(golden_config(facts))
    load_weights(model, GOLDEN / "bagel_tiny_weights.safetensors")
    return Golden(facts, load_file(GOLDEN / "bagel_tiny_vectors.safetensors"), model.requires_grad_(False))


@pytest.fixture
def digits() -> Bagel:
    """A digits model with random weights, output layer included, trained where LoRA would be."""
    torch.set_num_threads(1)
    model = Bagel(preset("bagel-digits"))
    model.initialize(seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name and "pos_embed" not in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.12)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("moe_gen" in name and "proj" in name)
    return model


def relative_error(found: Tensor, expected: Tensor) -> float:
    """|found - expected| / |expected|."""
    return float((found - expected).norm() / expected.norm())
