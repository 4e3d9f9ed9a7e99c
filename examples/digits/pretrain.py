# SPDX-License-Identifier: Apache-2.0
"""Trains the `bagel-digits` base by flow matching on half A of the scans, and measures and draws it.

    python examples/digits/pretrain.py [--seed 0] [--steps 2400] [--output DIR] [--grid FILE]

One seed and one thread count give one result. The base is meant to be mediocre in one respect only: the digit
that a prompt names is replaced by a random one with probability `--wrong`, so it draws clean digits, often the
wrong ones; and as often it leaves a source image as it is. Reinforcement learning then has something to learn
that needs no better drawing.
"""

from __future__ import annotations

import argparse
import copy
import math
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from unirl import digits
from unirl.assets import asset
from unirl.config import DatasetConfig
from unirl.data import CANVASES, PromptDataset, build_eval_request, load_dataset
from unirl.models.bagel import (
    Bagel,
    BagelConfig,
    BagelStage,
    ContextRequest,
    SourceImage,
    build_contexts,
    plan_layout,
    preset,
    save_model,
)
from unirl.models.bagel.codec import PixelCodec, latents_to_tokens
from unirl.models.bagel.source import image_key, source_pixels, source_sizes
from unirl.models.bagel.tokenizer import ByteTokenizer
from unirl.reward import DigitJudge, DigitProbability, digit_diversity, real_diversity
from unirl.types import STREAM_EVAL, NoiseRecipe, Part, SamplingParams

LEARNING_RATE = 4e-3
WARMUP_STEPS = 10
EMA_DECAY = 0.995
SHIFT = 3.0
SIBLINGS = 12
CANVAS_SHARES = (0.5, 0.25, 0.25)
EDIT_SHARE = 0.25
WORDS_UNTIL, RIGHT_UNTIL = 0.12, 0.4
"""Shares of the run. First the digits' bare words on one canvas: from whole sentences a model this small takes
ten times as long to find the word that matters. Then everything, with the right digits; then with wrong ones."""
TEXT_DROPOUT = 0.1
"""Share of steps without text, so that guidance has an unconditional branch."""
IMAGE_DROPOUT = 0.1
"""Share of edit steps that see the request and not the source image."""
NEAREST = 4
"""An edit's target is one of this many scans of the named digit that are most like the source."""


@dataclass(frozen=True)
class Corpus:
    """Half A, ready for training.

    Attributes:
        tokens: canvas to latent tokens `[898, L, C]` of all scans.
        sources: canvas to uint8 images `[H, W, 1]` of all scans.
        members: digit to the scans that show it.
        nearest: int64 `[898, 10, NEAREST]`: for each scan and digit the scans of that digit most like it.
    """

    tokens: dict[tuple[int, int], Tensor]
    sources: dict[tuple[int, int], list[np.ndarray]]
    members: list[Tensor]
    nearest: Tensor

    @classmethod
    def load(cls, config: BagelConfig) -> Corpus:
        """Renders all scans on all canvases."""
        scans = digits.half_a()
        tokens, sources = {}, {}
        for canvas in CANVASES:
            images = np.stack([digits.render(scan, canvas) for scan in scans.images])
            pixels = torch.from_numpy(images).permute(0, 3, 1, 2) * 2 - 1
            tokens[canvas] = latents_to_tokens(config, PixelCodec().encode(pixels))
            sources[canvas] = list(np.round(images * 255).astype(np.uint8))
        flat, labels = torch.from_numpy(scans.images).flatten(1), torch.from_numpy(scans.labels)
        members = [torch.nonzero(labels == digit)[:, 0] for digit in range(10)]
        between = torch.cdist(flat, flat)
        nearest = [m[between[:, m].topk(NEAREST, largest=False).indices] for m in members]
        return cls(tokens, sources, members, torch.stack(nearest, dim=1))


class Pretraining:
    """Draws batches and computes the loss; every random choice comes from one generator.

    Attributes:
        progress: share of the run that is over, 0 to 1; the lessons depend on it.
    """

    def __init__(self, model: Bagel, corpus: Corpus, wrong: float, seed: int) -> None:
        self.model = model
        self.corpus = corpus
        self.wrong = wrong
        self.progress = 0.0
        self.generator = torch.Generator().manual_seed(seed)
        self.tokenizer = ByteTokenizer()

    def loss(self) -> Tensor:
        """Mean squared error of the velocity on one batch: one canvas, one kind of context, all ten digits."""
        canvas, source_canvas, edit, which = CANVASES[0], CANVASES[0], False, "gen"
        if not self._words_only:
            shares = torch.tensor(CANVAS_SHARES)
            canvas = CANVASES[int(torch.multinomial(shares, 1, generator=self.generator))]
            source_canvas = CANVASES[self._below(len(CANVASES))]
            edit = self._chance(EDIT_SHARE)
            if self._chance(TEXT_DROPOUT):
                which = "cfg_text"
            elif edit and self._chance(IMAGE_DROPOUT):
                which = "cfg_img"
        requests, targets = [], []
        for digit in range(10):
            source = self._below(len(self.corpus.nearest)) if edit else None
            requests.append(self._request(digit, canvas, source, source_canvas))
            targets += [self._target(digit, source) for _ in range(SIBLINGS)]
        contexts = build_contexts(self.model, requests, (which,), pad_text=True)
        clean = self.corpus.tokens[canvas][targets]
        noise = torch.randn(clean.shape, generator=self.generator)
        noise_share = self._times(len(clean))
        at = noise_share[:, None, None]
        velocity = self.model.velocity(
            (1 - at) * clean + at * noise,
            noise_share,
            contexts,
            siblings=SIBLINGS,
            latent_position_ids=requests[0].layout.latent_position_ids(),
            which=which,
        )
        return (velocity - (noise - clean)).square().mean()

    @property
    def _words_only(self) -> bool:
        return self.progress < WORDS_UNTIL

    def _request(
        self, digit: int, canvas: tuple[int, int], source: int | None, source_canvas: tuple[int, int]
    ) -> ContextRequest:
        config = self.model.config
        phrasings = digits.PHRASINGS if source is None else digits.PHRASINGS + digits.EDIT_PHRASINGS
        phrasing = "{}" if self._words_only else phrasings[self._below(len(phrasings))]
        prompt_ids = self.tokenizer.encode(digits.prompt(digit, phrasing))
        if source is None:
            return ContextRequest(plan_layout(config, prompt_ids, canvas))
        image = self.corpus.sources[source_canvas][source]
        vae_pixels, vit_pixels = source_pixels(config, image)
        read = SourceImage(vae_pixels, vit_pixels, image_key(image), vae_pixels)
        return ContextRequest(
            plan_layout(config, prompt_ids, canvas, source_sizes(config, source_canvas)), read
        )

    def _target(self, digit: int, source: int | None) -> int:
        if source is not None:
            # An edit goes wrong by leaving its source as it is, from which the model also learns to look at it.
            near = self.corpus.nearest[source, digit]
            return source if self._chance(self.wrong) else int(near[self._below(NEAREST)])
        wrong = self.wrong if self.progress >= RIGHT_UNTIL else 0.0
        members = self.corpus.members[self._below(10) if self._chance(wrong) else digit]
        return int(members[self._below(len(members))])

    def _times(self, rows: int) -> Tensor:
        """Half of the rows uniform in time, half where the sampler's shifted schedule spends its steps."""
        times = torch.rand(rows, generator=self.generator)
        shifted = SHIFT * times / (1 + (SHIFT - 1) * times)
        return torch.where(torch.arange(rows) % 2 == 0, times, shifted)

    def _below(self, bound: int) -> int:
        return int(torch.randint(bound, (), generator=self.generator))

    def _chance(self, probability: float) -> bool:
        return float(torch.rand((), generator=self.generator)) < probability


def pretrain(config: BagelConfig, steps: int, wrong: float, seed: int, report_every: int = 200) -> Bagel:
    """The averaged weights after `steps` steps of AdamW with warm-up and a cosine to 0."""
    # Batch-invariant arithmetic pads every matrix product; training needs no exact replay.
    model = Bagel(config.replace(batch_invariant=False))
    model.initialize(seed)
    _widen(model)
    average = copy.deepcopy(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(1.0, (step + 1) / WARMUP_STEPS) * 0.5 * (1 + math.cos(math.pi * step / steps)),
    )
    work = Pretraining(model, Corpus.load(config), wrong, seed)
    start, running = time.perf_counter(), 0.0
    for step in range(1, steps + 1):
        work.progress = (step - 1) / steps
        loss = work.loss()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()
        decay = min(EMA_DECAY, step / (step + 10))
        with torch.no_grad():
            for kept, parameter in zip(average.parameters(), model.parameters(), strict=True):
                kept.lerp_(parameter, 1 - decay)
        running += float(loss.detach())
        if step % report_every == 0:
            print(
                f"step {step}: loss {running / report_every:.4f}, {time.perf_counter() - start:.0f} s",
                flush=True,
            )
            running = 0.0
    result = Bagel(config)
    result.load_state_dict(average.state_dict())
    return result.eval()


@torch.no_grad()
def _widen(model: Bagel) -> None:
    """Rescales fresh weights from the std of a model thousands wide to that of PyTorch's own layers at this width."""
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.mul_(1 / math.sqrt(3 * module.in_features) / module.weight.std().clamp(min=1e-6))
    model.language_model.model.embed_tokens.weight.mul_(
        1 / model.language_model.model.embed_tokens.weight.std()
    )


def generate(
    model: Bagel,
    dataset: PromptDataset,
    canvas: tuple[int, int],
    siblings: int,
    *,
    guidance_scale: float = 1.0,
    cfg_img_scale: float = 1.0,
) -> Part:
    """Images of all prompts of a set on evaluation noise: 14 deterministic steps, the recipes' default."""
    params = SamplingParams(
        height=canvas[0],
        width=canvas[1],
        num_inference_steps=14,
        eta=0.0,
        rule="flow",
        noise=NoiseRecipe(seed=1234, stream=STREAM_EVAL),
        guidance_scale=guidance_scale,
        cfg_img_scale=cfg_img_scale,
    )
    stage = BagelStage(model, PixelCodec(), ByteTokenizer())
    rows = build_eval_request(dataset, range(len(dataset)), siblings, params).frontier
    return stage.sample(rows)


def describe(rows: Part, scorers: tuple[DigitProbability, DigitJudge]) -> str:
    """Mean reward, both classifiers' accuracy, diversity."""
    probability, judge = (np.mean(s.score(rows.media, rows.prompts, rows.metadata)) for s in scorers)
    named = [row["digit"] for row in rows.metadata]
    spread = digit_diversity(rows.media, named)
    return (
        f"reward {probability:.3f}, accuracy {scorers[0].accuracy(rows.media, named):.3f}, "
        f"judge {judge:.3f}, diversity {spread:.2f} ({spread / real_diversity():.0%} of real scans)"
    )


def draw_grid(rows: Part, siblings: int, path: Path, zoom: int = 6) -> None:
    """A row of images a prompt, on evaluation noise; ink is white."""
    images = [np.pad(image[..., 0], 1, constant_values=0.3) for image in rows.media]
    lines = [np.concatenate(images[i : i + siblings], axis=1) for i in range(0, len(images), siblings)]
    pixels = np.round(np.concatenate(lines) * 255).astype(np.uint8).repeat(zoom, 0).repeat(zoom, 1)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=2400)
    parser.add_argument(
        "--wrong", type=float, default=0.5, help="probability of a random digit as the target"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=asset("bagel-digits"))
    parser.add_argument("--grid", type=Path, default=Path("runs/pretrain/grid.png"))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    start = time.perf_counter()
    model = pretrain(preset("bagel-digits"), arguments.steps, arguments.wrong, arguments.seed)
    save_model(model, arguments.output)
    print(f"trained in {time.perf_counter() - start:.0f} s, wrote {arguments.output}")
    scorers = (DigitProbability(), DigitJudge())
    held_out = load_dataset(DatasetConfig(name="digits_heldout"))
    for canvas in CANVASES:
        rows = generate(model, held_out, canvas, 24)
        print(f"held-out phrasing at {canvas[0]}x{canvas[1]}: {describe(rows, scorers)}")
    rows = generate(model, load_dataset(DatasetConfig(name="digits")), (8, 8), 4)
    print(f"trained phrasings: {describe(rows, scorers)}")
    rows = generate(model, held_out, (8, 8), 24, guidance_scale=3.0)
    print(f"text guidance 3: {describe(rows, scorers)}")
    rows = generate(model, load_dataset(DatasetConfig(name="digits_edit")), (8, 8), 8)
    print(f"image to image: {describe(rows, scorers)}")
    draw_grid(generate(model, held_out, (8, 8), 16), 16, arguments.grid)
    print(f"wrote {arguments.grid}")


if __name__ == "__main__":
    main()
