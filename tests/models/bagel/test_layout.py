# SPDX-License-Identifier: Apache-2.0
"""The planner: order of blocks, rotary positions, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from unirl.models.bagel import BagelConfig, plan_layout, preset

SEVEN_B = preset("bagel-7b-mot")
DIGITS = preset("bagel-digits")


def test_an_image_block_shares_one_rotary_position_and_moves_the_next_by_one() -> None:
    layout = plan_layout(SEVEN_B, [11, 12, 13], (512, 768), ((256, 512), (140, 280)))
    vae, vit, text = layout.gen.blocks
    assert [block.kind for block in layout.gen.blocks] == ["vae", "vit", "text"]
    assert (vae.num_tokens, vit.num_tokens, text.num_tokens) == (16 * 32 + 2, 10 * 20 + 2, 5)
    assert set(vae.position_ids()) == {0} and set(vit.position_ids()) == {1}
    assert text.position_ids() == [2, 3, 4, 5, 6]
    assert layout.gen.rope_offset == 7 and layout.gen.kv_len == 514 + 202 + 5
    assert layout.cfg_text.blocks == (vae, vit)
    assert layout.cfg_text.rope_offset == 2
    # Without the images in front, the text starts at position 0.
    assert [block.kind for block in layout.cfg_img.blocks] == ["text"]
    assert layout.cfg_img.blocks[0].position_ids() == [0, 1, 2, 3, 4]


def test_text_is_wrapped_in_bos_and_eos_and_images_in_their_markers() -> None:
    layout = plan_layout(SEVEN_B, [11], (512, 512), ((256, 256), (140, 140)))
    vae, vit, text = layout.gen.blocks
    assert text.token_ids == (151_644, 11, 151_645)
    assert vae.token_ids == vit.token_ids == layout.marker_ids == (151_652, 151_653)


def test_latent_positions_are_row_times_table_side_plus_column() -> None:
    layout = plan_layout(SEVEN_B, [], (32, 48))
    assert layout.latent_position_ids().tolist() == [0, 1, 2, 64, 65, 66]
    assert layout.seq_len == 8
    assert torch.equal(layout.position_ids("cfg_text"), torch.zeros(8, dtype=torch.int64))


@pytest.mark.parametrize(("canvas", "tokens"), [((512, 512), 1024), ((768, 768), 2304), ((1024, 1024), 4096)])
def test_tokens_of_the_public_canvases(canvas: tuple[int, int], tokens: int) -> None:
    layout = plan_layout(SEVEN_B, [1], canvas)
    assert (layout.num_latents, layout.seq_len) == (tokens, tokens + 2)


@pytest.mark.parametrize(
    ("config", "canvas", "words"),
    [
        (SEVEN_B, (1040, 512), ["r3.p1/2", "1040x512", "64 x 64", "1024 pixels"]),
        (DIGITS, (8, 18), ["r3.p1/2", "8x18", "8 x 8", "16 pixels"]),
    ],
)
def test_a_canvas_beyond_the_position_table_names_row_canvas_and_bound(
    config: BagelConfig, canvas: tuple[int, int], words: list[str]
) -> None:
    with pytest.raises(ValueError) as raised:
        plan_layout(config, [1], canvas, row="r3.p1/2")
    assert all(word in str(raised.value) for word in words), raised.value


@pytest.mark.parametrize("canvas", [(520, 512), (0, 16), (-16, 16)])
def test_a_canvas_off_the_pixel_stride_names_row_canvas_and_stride(canvas: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=rf"row r3\.p1/2: canvas {canvas[0]}x{canvas[1]}.* multiple of 16"):
        plan_layout(SEVEN_B, [1], canvas, row="r3.p1/2")


def test_a_source_off_its_patch_size_is_refused() -> None:
    with pytest.raises(ValueError, match="ViT source image 141x140 must be a positive multiple of 14"):
        plan_layout(SEVEN_B, [1], (512, 512), ((256, 256), (141, 140)))


def test_a_token_outside_the_vocabulary_names_row_token_and_size() -> None:
    with pytest.raises(ValueError, match="row r0: prompt token id 260 is outside the vocabulary of 260"):
        plan_layout(DIGITS, [1, 260], (8, 8), row="r0")


def test_an_unknown_configuration_key_and_a_missing_one_are_named() -> None:
    values = DIGITS.to_dict()
    assert BagelConfig.from_dict(values) == DIGITS
    with pytest.raises(ValueError, match=r"unknown key language\.hiden_size"):
        BagelConfig.from_dict({**values, "language": {**values["language"], "hiden_size": 1}})
    with pytest.raises(ValueError, match="missing key latent_patch_size"):
        BagelConfig.from_dict({k: v for k, v in values.items() if k != "latent_patch_size"})


def test_pixel_strides_of_the_presets() -> None:
    assert (SEVEN_B.pixel_stride, SEVEN_B.latent_channels, SEVEN_B.max_canvas) == (16, 64, 1024)
    assert (DIGITS.pixel_stride, DIGITS.latent_channels, DIGITS.max_canvas) == (2, 4, 16)
    with pytest.raises(ValueError, match="bagel-7b-mot"):
        preset("bagel-8b")
