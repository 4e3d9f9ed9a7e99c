# SPDX-License-Identifier: Apache-2.0
"""Pixels in and out: latent codecs, source images, prompts."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from unirl.models.bagel import preset
from unirl.models.bagel.codec import (
    FLUX_AUTOENCODER,
    FluxCodec,
    PixelCodec,
    latents_to_tokens,
    load_codec,
    tokens_to_latents,
)
from unirl.models.bagel.layers import sincos_table
from unirl.models.bagel.source import fitted_size, image_key, source_pixels, source_sizes
from unirl.models.bagel.tokenizer import load_tokenizer

SEVEN_B, DIGITS = preset("bagel-7b-mot"), preset("bagel-digits")


@pytest.fixture
def small_flux(monkeypatch: pytest.MonkeyPatch) -> torch.nn.Module:
    """FLUX's autoencoder with narrow blocks and random weights."""
    from diffusers import AutoencoderKL

    monkeypatch.setitem(FLUX_AUTOENCODER, "block_out_channels", [32, 32, 32, 32])
    torch.manual_seed(0)
    return AutoencoderKL.from_config(FLUX_AUTOENCODER).eval()


def test_the_pixel_codec_is_the_identity() -> None:
    codec = load_codec(DIGITS, None)
    assert isinstance(codec, PixelCodec)
    pixels = torch.rand(2, 1, 8, 8)
    assert torch.equal(codec.decode(codec.encode(pixels)), pixels)


def test_tokens_are_patches_row_by_row_with_channels_last() -> None:
    latents = torch.arange(2 * 16 * 4 * 6, dtype=torch.float32).reshape(2, 16, 4, 6)
    tokens = latents_to_tokens(SEVEN_B, latents)
    assert tokens.shape == (2, 6, 64)
    expected = torch.stack(
        [latents[1, :, 2, 4], latents[1, :, 2, 5], latents[1, :, 3, 4], latents[1, :, 3, 5]]
    )
    assert torch.equal(tokens[1, 5], expected.flatten())
    assert torch.equal(tokens_to_latents(SEVEN_B, tokens, (2, 3)), latents)


def test_flux_latents_are_scaled_means(small_flux: torch.nn.Module, tmp_path: Path) -> None:
    small_flux.save_pretrained(tmp_path / "vae")
    codec = load_codec(SEVEN_B, tmp_path)
    assert isinstance(codec, FluxCodec)
    pixels = torch.rand(1, 3, 32, 48) * 2 - 1
    latents = codec.encode(pixels)
    assert latents.shape == (1, 16, 4, 6)
    assert torch.equal(codec.encode(pixels), latents)  # no sample is drawn
    with torch.no_grad():
        mean = small_flux.encode(pixels).latent_dist.mean
        assert torch.allclose(latents, (mean - 0.1159) * 0.3611, atol=1e-6)
        decoded = small_flux.decode(mean).sample
    assert torch.allclose(codec.decode(latents), decoded, atol=1e-5)


def test_the_public_autoencoder_file_is_read(small_flux: torch.nn.Module, tmp_path: Path) -> None:
    original = {_original_name(name): value for name, value in small_flux.state_dict().items()}
    attention = re.compile(r"mid\.attn_1\.(q|k|v|proj_out)\.weight")
    original = {
        name: value[:, :, None, None] if attention.search(name) else value for name, value in original.items()
    }
    save_file({name: value.contiguous() for name, value in original.items()}, tmp_path / "ae.safetensors")
    codec = load_codec(SEVEN_B, tmp_path)
    loaded = codec.autoencoder.state_dict()
    assert loaded.keys() == small_flux.state_dict().keys()
    assert all(torch.equal(loaded[name], value) for name, value in small_flux.state_dict().items())


def test_missing_autoencoder_weights_name_both_places(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=rf"no VAE weights: neither {tmp_path}/ae.safetensors nor {tmp_path}/vae/"
    ):
        load_codec(SEVEN_B, tmp_path)
    with pytest.raises(ValueError, match="'flux' needs the checkpoint folder"):
        load_codec(SEVEN_B, None)


@pytest.mark.parametrize(
    ("size", "vae", "vit"),
    [
        ((512, 512), (512, 512), (490, 490)),
        ((1024, 1024), (512, 512), (490, 490)),
        ((2048, 1024), (512, 256), (490, 252)),
        ((100, 100), (256, 256), (112, 112)),
        ((4000, 100), (512, 16), (490, 14)),
    ],
)
def test_sources_keep_their_shape_within_the_bounds(
    size: tuple[int, int], vae: tuple[int, int], vit: tuple[int, int]
) -> None:
    assert source_sizes(SEVEN_B, size) == (vae, vit)
    assert fitted_size(size[::-1], 512, 256, 16) == vae[::-1]


def test_a_digit_goes_in_as_it_is() -> None:
    image = np.random.default_rng(0).integers(0, 256, (8, 12, 1), dtype=np.uint8)
    vae, vit = source_pixels(DIGITS, image)
    expected = torch.from_numpy(image[:, :, 0].astype(np.float32)) / 127.5 - 1
    assert torch.equal(vae[0], expected) and torch.equal(vit[0], expected)
    assert float(vae.min()) >= -1 and float(vae.max()) <= 1
    assert image_key(image) != image_key(image.reshape(12, 8, 1))


def test_a_source_of_another_type_is_refused() -> None:
    with pytest.raises(ValueError, match=r"uint8 \[H, W, 1\] or \[H, W, 3\]; got float64 \[8, 8, 1\]"):
        source_pixels(DIGITS, np.zeros((8, 8, 1)))


def test_prompts_become_bytes_for_digits_and_need_files_otherwise(tmp_path: Path) -> None:
    assert load_tokenizer(DIGITS, None).encode("né 3") == [110, 195, 169, 32, 51]
    with pytest.raises(ValueError, match=r"tokenizer_config\.json is missing"):
        load_tokenizer(SEVEN_B, tmp_path)


def test_the_fresh_position_table_tells_all_places_apart() -> None:
    table = sincos_table(8, 64)
    distances = torch.cdist(table, table) + 10 * torch.eye(64)
    assert float(distances.min()) > 0.5
    # sin and cos of column 3 at frequency 1; row 5's in the second half.
    place = table[5 * 8 + 3].double()
    angle = torch.tensor([3.0, 5.0], dtype=torch.float64)
    assert torch.allclose(place[[0, 32]], angle.sin(), atol=1e-7)
    assert torch.allclose(place[[16, 48]], angle.cos(), atol=1e-7)


def _original_name(name: str) -> str:
    """A diffusers name in the naming of the published autoencoder file."""
    levels = 4
    name = re.sub(
        r"(encoder|decoder)\.mid_block\.resnets\.(\d)",
        lambda m: f"{m[1]}.mid.block_{int(m[2]) + 1}",
        name,
    )
    name = name.replace("mid_block.attentions.0", "mid.attn_1").replace("group_norm", "norm")
    for theirs, ours in (("q", "to_q"), ("k", "to_k"), ("v", "to_v"), ("proj_out", "to_out.0")):
        name = name.replace(f"attn_1.{ours}.", f"attn_1.{theirs}.")
    name = re.sub(r"down_blocks\.(\d)\.resnets\.(\d)", r"down.\1.block.\2", name)
    name = re.sub(r"down_blocks\.(\d)\.downsamplers\.0", r"down.\1.downsample", name)
    name = re.sub(
        r"up_blocks\.(\d)\.resnets\.(\d)", lambda m: f"up.{levels - 1 - int(m[1])}.block.{m[2]}", name
    )
    name = re.sub(r"up_blocks\.(\d)\.upsamplers\.0", lambda m: f"up.{levels - 1 - int(m[1])}.upsample", name)
    return name.replace("conv_norm_out", "norm_out").replace("conv_shortcut", "nin_shortcut")
