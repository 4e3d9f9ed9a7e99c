# SPDX-License-Identifier: Apache-2.0
"""Tensor names and shapes of the public checkpoint, and the files that hold them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.bagel.conftest import GOLDEN, Golden
from unirl.models.bagel import Bagel, load_model, load_weights, preset, save_model, save_weights
from unirl.models.bagel.config import BAGEL_7B_MOT, BagelConfig


def public_shapes() -> dict[str, tuple[int, ...]]:
    """Names and shapes of BAGEL-7B-MoT, as its checkpoint is published."""
    hidden, mlp, kv = 3584, 18944, 512
    shapes: dict[str, tuple[int, ...]] = {
        "language_model.model.embed_tokens.weight": (152064, hidden),
        "language_model.lm_head.weight": (152064, hidden),
        "language_model.model.norm.weight": (hidden,),
        "language_model.model.norm_moe_gen.weight": (hidden,),
        "time_embedder.mlp.0.weight": (hidden, 256),
        "time_embedder.mlp.0.bias": (hidden,),
        "time_embedder.mlp.2.weight": (hidden, hidden),
        "time_embedder.mlp.2.bias": (hidden,),
        "vae2llm.weight": (hidden, 64),
        "vae2llm.bias": (hidden,),
        "llm2vae.weight": (64, hidden),
        "llm2vae.bias": (64,),
        "latent_pos_embed.pos_embed": (4096, hidden),
        "vit_pos_embed.pos_embed": (4900, hidden),
        "connector.fc1.weight": (hidden, 1152),
        "connector.fc1.bias": (hidden,),
        "connector.fc2.weight": (hidden, hidden),
        "connector.fc2.bias": (hidden,),
    }
    for layer in range(28):
        prefix = f"language_model.model.layers.{layer}"
        for suffix in ("", "_moe_gen"):
            for name, width in (("q", hidden), ("k", kv), ("v", kv)):
                shapes[f"{prefix}.self_attn.{name}_proj{suffix}.weight"] = (width, hidden)
                shapes[f"{prefix}.self_attn.{name}_proj{suffix}.bias"] = (width,)
            shapes[f"{prefix}.self_attn.o_proj{suffix}.weight"] = (hidden, hidden)
            shapes[f"{prefix}.self_attn.q_norm{suffix}.weight"] = (128,)
            shapes[f"{prefix}.self_attn.k_norm{suffix}.weight"] = (128,)
            shapes[f"{prefix}.mlp{suffix}.gate_proj.weight"] = (mlp, hidden)
            shapes[f"{prefix}.mlp{suffix}.up_proj.weight"] = (mlp, hidden)
            shapes[f"{prefix}.mlp{suffix}.down_proj.weight"] = (hidden, mlp)
            shapes[f"{prefix}.input_layernorm{suffix}.weight"] = (hidden,)
            shapes[f"{prefix}.post_attention_layernorm{suffix}.weight"] = (hidden,)
    vision = "vit_model.vision_model"
    shapes[f"{vision}.embeddings.patch_embedding.weight"] = (1152, 588)
    shapes[f"{vision}.embeddings.patch_embedding.bias"] = (1152,)
    shapes[f"{vision}.embeddings.position_embedding.weight"] = (4900, 1152)
    for part in ("weight", "bias"):
        shapes[f"{vision}.post_layernorm.{part}"] = (1152,)
    for layer in range(26):
        prefix = f"{vision}.encoder.layers.{layer}"
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            shapes[f"{prefix}.self_attn.{name}.weight"] = (1152, 1152)
            shapes[f"{prefix}.self_attn.{name}.bias"] = (1152,)
        shapes[f"{prefix}.mlp.fc1.weight"], shapes[f"{prefix}.mlp.fc1.bias"] = (4304, 1152), (4304,)
        shapes[f"{prefix}.mlp.fc2.weight"], shapes[f"{prefix}.mlp.fc2.bias"] = (1152, 4304), (1152,)
        for name in ("layer_norm1", "layer_norm2"):
            for part in ("weight", "bias"):
                shapes[f"{prefix}.{name}.{part}"] = (1152,)
    return shapes


def test_the_7b_model_has_the_public_names_and_shapes() -> None:
    with torch.device("meta"):
        model = Bagel(preset("bagel-7b-mot"))
    found = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert found == public_shapes()
    assert not dict(model.named_buffers())
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e9, 2) == 14.61


def test_the_digits_model_is_small(digits: Bagel) -> None:
    assert sum(parameter.numel() for parameter in digits.parameters()) < 2_000_000


def test_one_file_and_shards_give_every_tensor_back(golden: Golden, tmp_path: Path) -> None:
    original = load_file(GOLDEN / "bagel_tiny_weights.safetensors")
    save_model(golden.model, tmp_path / "one")
    assert [path.name for path in (tmp_path / "one").glob("*.safetensors")] == ["model.safetensors"]
    save_weights(golden.model, tmp_path / "many", max_shard_bytes=100_000)
    shards = sorted(path.name for path in (tmp_path / "many").glob("*.safetensors"))
    assert len(shards) > 5
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(original)
    assert sorted(set(index["weight_map"].values())) == shards
    assert index["metadata"]["total_size"] == sum(t.numel() * 4 for t in original.values())
    for folder in ("one", "many"):
        model = load_model(tmp_path / folder, golden.model.config)
        assert {
            name: torch.equal(p, original[name]) for name, p in model.named_parameters()
        } == dict.fromkeys(original, True)
    assert load_model(tmp_path / "one").config == golden.model.config


def test_loading_into_an_existing_model_keeps_its_parameters(golden: Golden, tmp_path: Path) -> None:
    save_weights(golden.model, tmp_path)
    model = Bagel(golden.model.config)
    before = dict(model.named_parameters())
    load_weights(model, tmp_path)
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), golden.model.parameters(), strict=True))


def test_missing_unexpected_and_misshaped_tensors_are_named_with_the_path(tmp_path: Path) -> None:
    tensors = load_file(GOLDEN / "bagel_tiny_weights.safetensors")
    del tensors["vae2llm.bias"]
    tensors["vae2llm.extra"] = torch.zeros(1)
    tensors["llm2vae.bias"] = torch.zeros(65)
    path = tmp_path / "broken.safetensors"
    save_file(tensors, path)
    facts = json.loads((GOLDEN / "bagel_tiny.json").read_text())
    from tests.models.bagel.conftest import golden_config

    model = Bagel(golden_config(facts))
    before = model.vae2llm.weight.clone()
    with pytest.raises(ValueError) as raised:
        load_weights(model, path)
    message = str(raised.value)
    assert str(path) in message
    assert "missing: vae2llm.bias" in message
    assert "unexpected: vae2llm.extra" in message
    assert "llm2vae.bias (file [65], model [64])" in message
    assert torch.equal(model.vae2llm.weight, before)  # nothing was loaded halfway


def test_missing_files_are_named(golden: Golden, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no weights at .*nowhere"):
        load_weights(golden.model, tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"no weights in .*model\.safetensors"):
        load_weights(golden.model, tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(ValueError, match=r"model\.safetensors is no readable safetensors file"):
        load_weights(golden.model, tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "part-1.safetensors"}}')
    with pytest.raises(ValueError, match=r"names part-1\.safetensors, which is not in"):
        load_weights(golden.model, tmp_path)


def test_public_configuration_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "llm_config.json").write_text(
        json.dumps({"hidden_size": 3584, "num_hidden_layers": 30, "qk_norm": True, "model_type": "qwen2"})
    )
    with pytest.raises(ValueError, match=r"vit_config\.json"):
        BagelConfig.load(tmp_path)
    (tmp_path / "vit_config.json").write_text(json.dumps({"hidden_size": 1152, "num_hidden_layers": 27}))
    config = BagelConfig.load(tmp_path)
    assert config.language.num_hidden_layers == 30
    assert config.vision.num_hidden_layers == BAGEL_7B_MOT.vision.num_hidden_layers == 26
