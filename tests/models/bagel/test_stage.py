# SPDX-License-Identifier: Apache-2.0
"""Rows through the stage: what is stored, what replay gives back, and that a row never depends on its neighbours."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from unirl.models.bagel import Bagel, BagelStage, build_contexts, save_model
from unirl.models.bagel.batching import plan_batches
from unirl.models.bagel.codec import PixelCodec
from unirl.models.bagel.fingerprint import group_layout
from unirl.models.bagel.tokenizer import ByteTokenizer
from unirl.ops import keyed_normal
from unirl.protocols import Stage
from unirl.types import (
    UNUSED,
    LatentSegment,
    LayoutRecord,
    NoiseRecipe,
    Part,
    SamplingParams,
    fingerprints_of,
)

PARAMS = SamplingParams(
    height=12,
    width=12,
    num_inference_steps=5,
    eta=0.8,
    rule="flow",
    noise=NoiseRecipe(seed=11),
    storage="padded",
)
PROMPTS = ("a handwritten three", "seven", "a nine")
CANVASES = ([8, 8], [12, 12], [8, 8])


@pytest.fixture
def stage(digits: Bagel) -> BagelStage:
    return BagelStage(digits, PixelCodec(), ByteTokenizer())


def _rows(
    params: SamplingParams = PARAMS,
    *,
    siblings: int = 3,
    canvases: Sequence[list[int]] = CANVASES,
    images: tuple[np.ndarray | None, ...] | None = None,
    prompts: tuple[str, ...] = PROMPTS,
) -> Part:
    roots = Part(
        ids=tuple(f"r0.p{i}" for i in range(len(prompts))),
        prompts=prompts,
        metadata=tuple({"canvas": canvas} for canvas in canvases),
        images=images,
    )
    return roots.fork(siblings, params)


def _image(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (8, 12, 1), dtype=np.uint8)


def _steps(part: Part, *sets: Sequence[int]) -> Tensor:
    """One set a group, in turn."""
    groups = list(dict.fromkeys(part.group_ids))
    return torch.tensor([list(sets[groups.index(group) % len(sets)]) for group in part.group_ids])


def _sample(stage: BagelStage, part: Part, sde_steps: Tensor, *, decode: bool = True) -> Part:
    return stage.sample(part.replace(sde_steps=sde_steps), decode=decode)


def test_the_stage_satisfies_the_protocol(stage: BagelStage) -> None:
    assert isinstance(stage, Stage)
    assert (stage.pixel_stride, stage.max_side) == (2, 8)


def test_a_saved_folder_gives_the_same_images(stage: BagelStage, tmp_path: Path) -> None:
    save_model(stage.model, tmp_path)
    again = BagelStage.from_pretrained(tmp_path)
    part = _rows(images=(None, _image(1), None))
    expected, found = (_sample(s, part, _steps(part, [0, 2])) for s in (stage, again))
    assert torch.equal(expected.segment.latents, found.segment.latents)
    assert again.model.config == stage.model.config


def test_sigmas_are_bagels_static_shift_on_every_canvas(stage: BagelStage) -> None:
    expected = [3 * t / (1 + 2 * t) for t in (1.0, 0.8, 0.6, 0.4, 0.2, 0.0)]
    for canvas in ((8, 8), (12, 12)):
        assert stage.sigmas(PARAMS, canvas).tolist() == pytest.approx(expected, abs=1e-15)
    shifted = dataclasses.replace(PARAMS, shift=1.0)
    assert stage.sigmas(shifted, (8, 8)).tolist() == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2, 0.0])


def test_every_step_trained_stores_all_latents_from_initial_noise_to_the_decoded_one(
    stage: BagelStage,
) -> None:
    part = _rows()
    out = _sample(stage, part, _steps(part, range(5)))
    segment: LatentSegment = out.segment
    assert segment.latents.shape == (9, 6, 36, 4) and segment.log_probs.shape == (9, 5)
    assert segment.frame_steps.tolist() == [list(range(6))] * 9
    assert segment.token_counts.tolist() == [16] * 3 + [36] * 3 + [16] * 3
    keys = PARAMS.noise.initial_keys(part.ids)
    noise = keyed_normal((9, 36, 4), seed=11, row_keys=keys, step=0)
    for row, tokens in enumerate(segment.token_counts.tolist()):
        assert torch.equal(segment.latents[row, 0, :tokens], noise[row, :tokens])
        assert not segment.latents[row, :, tokens:].any()
        image = out.media[row]
        height, width = part.canvases()[row]
        assert image.shape == (height, width, 1) and image.dtype == np.float32
        assert image.min() >= 0 and image.max() <= 1
        # Token 1 of the last frame covers rows 0-1 and columns 2-3.
        corner = (segment.latents[row, -1, 1] / 2 + 0.5).clamp(0, 1).reshape(2, 2)
        assert np.array_equal(image[0:2, 2:4, 0], corner.numpy())


def test_cps_trains_all_steps_but_the_last(stage: BagelStage) -> None:
    part = _rows(dataclasses.replace(PARAMS, rule="cps"))
    assert _sample(stage, part, _steps(part, range(4))).segment.log_probs.shape == (9, 4)
    with pytest.raises(ValueError, match="rule 'cps'; allowed: 0 to 3"):
        _sample(stage, part, _steps(part, range(5)))


def test_a_window_keeps_its_frames_and_the_last_one(stage: BagelStage) -> None:
    part = _rows()
    segment = _sample(stage, part, _steps(part, [2, 3], [0, 2])).segment
    assert segment.frame_steps[0].tolist() == [2, 3, 4, 5, UNUSED]
    assert segment.frame_steps[3].tolist() == [0, 1, 2, 3, 5]
    everything = _sample(stage, part, _steps(part, [2, 3], [0, 2]), decode=False)
    assert everything.media is None
    assert torch.equal(everything.segment.latents, segment.latents)


def test_log_probs_are_each_rows_own(stage: BagelStage) -> None:
    """Recomputed row by row in float64 from the stored frames and the model's velocity alone."""
    part = _rows(siblings=4)
    segment = _sample(stage, part, _steps(part, [0, 1, 3])).segment
    for row in range(len(part)):
        one = part.select([row])
        (batch,) = plan_batches(one, stage.model, stage.codec, stage.tokenizer)
        contexts = build_contexts(stage.model, batch.requests, ["gen"])
        tokens = int(segment.token_counts[row])
        for slot, step in enumerate((0, 1, 3)):
            x, following = (
                segment.frame(torch.full((12,), at))[row, :tokens].double() for at in (step, step + 1)
            )
            s, after, second = (float(segment.sigmas[row, at]) for at in (step, step + 1, 1))
            velocity = stage.model.velocity(
                x.float()[None],
                torch.tensor([s]),
                contexts,
                siblings=1,
                latent_position_ids=batch.positions,
            )[0].double()
            dt = after - s
            std = 0.8 * math.sqrt(s / (1 - (second if s == 1 else s)))
            mean = x * (1 + std**2 * dt / (2 * s)) + velocity * (1 + std**2 * (1 - s) / (2 * s)) * dt
            scale = std * math.sqrt(-dt)
            density = (
                -((following - mean) ** 2) / (2 * scale**2) - math.log(scale) - 0.5 * math.log(2 * math.pi)
            )
            assert float(segment.log_probs[row, slot]) == pytest.approx(
                float(density.mean().detach()), abs=2e-6
            )
    for group in range(3):
        assert len(set(segment.log_probs[group * 4 : group * 4 + 4, 0].tolist())) == 4


@pytest.mark.parametrize("rule", ["flow", "cps", "dance"])
@pytest.mark.parametrize("trajectory_dtype", ["float32", "bfloat16"])
def test_replay_before_any_update_gives_a_ratio_of_one(
    stage: BagelStage, rule: str, trajectory_dtype: str
) -> None:
    params = dataclasses.replace(
        PARAMS, rule=rule, trajectory_dtype=trajectory_dtype, guidance_scale=2.0, cfg_renorm_type="channel"
    )
    part = _rows(params, images=(None, _image(1), _image(2)))
    out = _sample(stage, part, _steps(part, [0, 2], [1, 3], [0, 1]))
    replay = stage.replay(out)
    ratio = (replay.log_probs - out.segment.log_probs).exp()
    assert float((ratio - 1).abs().max().detach()) <= 1e-6
    assert torch.equal(replay.fingerprints, out.fingerprints)
    assert torch.equal(replay.token_counts, out.segment.token_counts)


def test_replay_after_a_weight_change_has_another_ratio(stage: BagelStage) -> None:
    part = _rows()
    out = _sample(stage, part, _steps(part, [0, 2]))
    with torch.no_grad():
        stage.model.language_model.model.layers[2].mlp_moe_gen.down_proj.weight.mul_(1.01)
    difference = (stage.replay(out).log_probs - out.segment.log_probs).abs()
    assert float(difference.min().detach()) > 1e-6


def test_a_row_alone_and_among_others_has_the_same_bits(stage: BagelStage) -> None:
    params = dataclasses.replace(PARAMS, guidance_scale=3.0, cfg_img_scale=1.5, cfg_interval=(0.3, 1.0))
    part = _rows(params, images=(None, _image(1), _image(1)))
    steps = _steps(part, [0, 2], [1, 3], [0, 1])
    together = _sample(stage, part, steps)
    replayed = stage.replay(together)
    for row in (0, 4, 8):
        alone = _sample(stage, part.select([row]), steps[[row]])
        tokens = int(together.segment.token_counts[row])
        stored = together.segment.select([row])
        for frame, step in enumerate(alone.segment.frame_steps[0].tolist()):
            assert torch.equal(
                alone.segment.latents[0, frame, :tokens], stored.frame(torch.tensor([step]))[0, :tokens]
            )
        assert torch.equal(alone.segment.log_probs, stored.log_probs)
        assert torch.equal(alone.fingerprints, together.fingerprints[[row]])
        assert torch.equal(stage.replay(together.select([row])).log_probs[0], replayed.log_probs[row])


def test_permuting_rows_permutes_results(stage: BagelStage) -> None:
    part = _rows(images=(_image(0), None, _image(2)))
    steps = _steps(part, [0, 2], [1, 3], [0, 1])
    order = [7, 0, 4, 8, 1, 3, 2, 6]  # row 5 left out: groups of unequal size
    plain = _sample(stage, part, steps).select(order)
    permuted = _sample(stage, part.select(order), steps[order])
    assert torch.equal(plain.segment.latents, permuted.segment.latents)
    assert torch.equal(plain.segment.log_probs, permuted.segment.log_probs)
    assert torch.equal(plain.fingerprints, permuted.fingerprints)
    assert all(np.array_equal(a, b) for a, b in zip(plain.media, permuted.media, strict=True))
    assert torch.equal(stage.replay(plain).log_probs, stage.replay(permuted).log_probs)


def test_siblings_start_from_distinct_noise_or_from_one(stage: BagelStage) -> None:
    part = _rows(canvases=([8, 8],) * 3)
    frames = _sample(stage, part, _steps(part, [0])).segment.latents[:, 0]
    assert len({frame.numpy().tobytes() for frame in frames}) == 9
    same = _rows(
        dataclasses.replace(PARAMS, noise=NoiseRecipe(seed=11, init_same_noise=True)), canvases=([8, 8],) * 3
    )
    segment = _sample(stage, same, _steps(same, [0])).segment
    assert len({frame.numpy().tobytes() for frame in segment.latents[:, 0]}) == 3
    assert len({frame.numpy().tobytes() for frame in segment.latents[:, 1]}) == 9


def test_no_trained_steps_is_the_euler_ode(stage: BagelStage) -> None:
    part = _rows(canvases=([8, 8],) * 3)
    segment = _sample(stage, part, torch.zeros((9, 0), dtype=torch.int64)).segment
    assert segment.latents.shape == (9, 1, 36, 4) and segment.log_probs.shape == (9, 0)
    (batch,) = plan_batches(part, stage.model, stage.codec, stage.tokenizer)
    contexts = build_contexts(stage.model, batch.requests, ["gen"])
    latents = keyed_normal((9, 16, 4), seed=11, row_keys=PARAMS.noise.initial_keys(part.ids), step=0)
    sigmas = stage.sigmas(PARAMS, (8, 8))
    with torch.no_grad():
        for step in range(5):
            velocity = stage.model.velocity(
                latents,
                sigmas[step].expand(9),
                contexts,
                siblings=3,
                latent_position_ids=batch.positions,
            )
            latents = latents + velocity * float(sigmas[step + 1] - sigmas[step])
    assert torch.allclose(segment.latents[:, 0, :16], latents, atol=2e-5)
    assert stage.replay(part.replace(segment=segment)).log_probs.shape == (9, 0)
    assert torch.equal(stage.sample(part).segment.latents, segment.latents)


def test_means_and_scales_of_a_replay(stage: BagelStage) -> None:
    part = _rows(canvases=([8, 8],) * 3)
    out = _sample(stage, part, _steps(part, [0, 2], [1, 3]))
    replay = stage.replay(out, with_means=True)
    assert replay.means.shape == (9, 2, 16, 4) and replay.scales.shape == (9, 2)
    for row, steps in ((0, (0, 2)), (3, (1, 3))):
        for slot, step in enumerate(steps):
            following = out.segment.frame(
                torch.full((9,), step + 1) if row == 0 else out.segment.sde_steps[:, slot] + 1
            )
            scale = replay.scales[row, slot]
            z = (following[row, :16] - replay.means[row, slot]) / scale
            expected = -0.5 * (z**2).mean() - torch.log(scale) - 0.5 * math.log(2 * math.pi)
            assert float(expected.detach()) == pytest.approx(
                float(replay.log_probs[row, slot].detach()), abs=1e-5
            )
    with pytest.raises(ValueError, match="replay one canvas at a time"):
        stage.replay(_sample(stage, _rows(), _steps(part, [0])), with_means=True)


def test_rows_stored_without_padding_replay_to_the_same_bits(stage: BagelStage) -> None:
    """Groups of three canvases, one of them not square, that were generated in the same calls and stored twice."""
    canvases = ([8, 8], [12, 8], [12, 12])
    part = _rows(canvases=canvases)
    packed = _rows(dataclasses.replace(PARAMS, storage="ragged"), canvases=canvases)
    steps = _steps(part, [0, 2], [1, 3], [0, 1])
    padded_out, packed_out = _sample(stage, part, steps), _sample(stage, packed, steps)
    assert (padded_out.segment.storage, packed_out.segment.storage) == ("padded", "ragged")
    assert padded_out.segment.stored_tokens() == 9 * 36
    assert packed_out.segment.stored_tokens() == 3 * (16 + 24 + 36)
    assert torch.equal(padded_out.segment.log_probs, packed_out.segment.log_probs)
    assert torch.equal(padded_out.fingerprints, packed_out.fingerprints)
    for index in (list(range(9)), [8, 0, 4], [5]):
        replays = [stage.replay(out.select(index)).log_probs for out in (padded_out, packed_out)]
        assert torch.equal(*replays)


def test_rows_without_a_canvas_are_those_of_the_default_canvas_byte_for_byte(stage: BagelStage) -> None:
    named = _rows(dataclasses.replace(PARAMS, storage="ragged"), canvases=([12, 12],) * 3)
    plain = named.replace(metadata=({},) * 9)
    one, other = (_sample(stage, part, _steps(part, [0, 2])) for part in (named, plain))
    assert one.canvases() == other.canvases()
    for name, tensor in one.segment.tensors().items():
        assert tensor.numpy().tobytes() == other.segment.tensors()[name].numpy().tobytes(), name
    assert [m.tobytes() for m in one.media] == [m.tobytes() for m in other.media]
    assert torch.equal(one.fingerprints, other.fingerprints)
    assert one.segment.storage == "ragged" and one.segment.stored_tokens() == 9 * 36


def test_source_images_are_replayed_with_gradients(stage: BagelStage) -> None:
    part = _rows(images=(_image(0),) * 3)
    out = _sample(stage, part, _steps(part, [0, 2]))
    replay = stage.replay(out)
    replay.log_probs.sum().backward()
    gradients = {name: p.grad for name, p in stage.model.named_parameters() if p.grad is not None}
    assert len(gradients) == sum(p.requires_grad for p in stage.model.parameters())
    assert all(gradient.isfinite().all() for gradient in gradients.values())


def test_what_the_stage_refuses(stage: BagelStage) -> None:
    def refused(message: str, part: Part, steps: Sequence[int] = (0,)) -> None:
        with pytest.raises(ValueError, match=message):
            _sample(stage, part, _steps(part, steps))

    refused(r"r0\.p1/0.*\[12, 18\]", _rows(canvases=([8, 8], [12, 18], [8, 8])))
    refused(r"r0\.p0/0.*\[7, 8\].*multiple", _rows(canvases=([7, 8], [8, 8], [8, 8])))
    refused(r"r0\.p2/0.*\[16, 16\].*64 tokens.*36", _rows(canvases=([8, 8], [8, 8], [16, 16])))
    refused("allowed: 0 to 4", _rows(), (0, 5))
    refused("sampling.eta is 0", _rows(dataclasses.replace(PARAMS, eta=0.0)))
    refused(
        "cfg_img_scale is 1.5 but guidance_scale is 1", _rows(dataclasses.replace(PARAMS, cfg_img_scale=1.5))
    )
    with pytest.raises(ValueError, match=r"sde_steps has shape \[9\]; expected \[9, S\]"):
        _sample(stage, _rows(), torch.zeros(9, dtype=torch.int64))
    with pytest.raises(ValueError, match="replay needs rows with a stored segment"):
        stage.replay(_rows())


def test_a_changed_source_pixel_or_prompt_changes_the_fingerprint(stage: BagelStage) -> None:
    part = _rows(images=(_image(0), None, None))
    before = _sample(stage, part, _steps(part, [0]))
    touched = _image(0)
    touched[3, 4, 0] ^= 1
    prompts = (PROMPTS[0], PROMPTS[1], PROMPTS[2] + " ")
    other = _rows(images=(touched, None, None), prompts=prompts).replace(segment=before.segment)
    after = stage.replay(other)
    same = (before.fingerprints == after.fingerprints).all(dim=1).tolist()
    assert same == [False] * 3 + [True] * 3 + [False] * 3


def test_every_field_of_every_context_is_in_the_fingerprint(stage: BagelStage) -> None:
    part = _rows(siblings=1, images=(_image(0), _image(1), _image(2)), canvases=([8, 8],) * 3)
    (batch,) = plan_batches(part, stage.model, stage.codec, stage.tokenizer)
    contexts = build_contexts(stage.model, batch.requests)
    record = group_layout(
        contexts,
        1,
        marker_ids=stage.model.marker_ids,
        latent_position_ids=batch.positions,
        canvas=(8, 8),
    )
    fields = {name: torch.tensor(values, dtype=torch.int64) for name, values in record.fields().items()}
    original = fingerprints_of([record])
    assert torch.equal(fingerprints_of([LayoutRecord.of(fields)]), original)
    names = {
        f"{c}.{f}"
        for c in ("gen", "cfg_text", "cfg_img")
        for f in ("kv_len", "rope_offset", "token_ids", "position_ids")
    }
    assert names | {"seq_len", "canvas", "gen.source_pixels", "cfg_text.source_pixels"} <= set(fields)
    assert fields["gen.kv_len"].item() == 26 + 26 + 7 and fields["cfg_img.kv_len"].item() == 7
    for name, value in fields.items():
        for index in range(len(value)):
            changed = value.clone()
            changed[index] += 1
            assert not torch.equal(fingerprints_of([LayoutRecord.of({**fields, name: changed})]), original), (
                name
            )
    for context in ("gen", "cfg_text", "cfg_img"):  # a value that moves to the neighbouring field
        token_ids, position_ids = fields[f"{context}.token_ids"], fields[f"{context}.position_ids"]
        moved = {
            **fields,
            f"{context}.token_ids": torch.cat((token_ids, position_ids[:1])),
            f"{context}.position_ids": position_ids[1:],
        }
        assert not torch.equal(fingerprints_of([LayoutRecord.of(moved)]), original)


def test_the_fingerprint_is_of_what_was_fed_not_of_what_was_planned(
    stage: BagelStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = _rows(canvases=([8, 8],) * 3)
    honest = _sample(stage, part, _steps(part, [0])).fingerprints
    from unirl.models.bagel import context

    embed = context._embed

    def off_by_one(*args: object) -> object:
        fed = embed(*args)
        return fed._replace(positions=fed.positions + 1)

    monkeypatch.setattr(context, "_embed", off_by_one)
    assert not (_sample(stage, part, _steps(part, [0])).fingerprints == honest).all(dim=1).any()
