# SPDX-License-Identifier: Apache-2.0
"""Trains the classifier behind the `digit_probability` reward on half B of the scans, and reports it on half
A.

    python examples/digits/train_scorer.py [--seed 0] [--output FILE]

A few seconds on one core; one thread and one seed give one result.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from unirl.data import CANVASES
from unirl.digits import half_a, half_b, read, render
from unirl.reward.digit_judge import DigitJudge
from unirl.reward.digit_probability import WEIGHTS, DigitClassifier, DigitProbability, scans_to_input

_STEPS = 280
_BATCH = 128
_LEARNING_RATE = 2e-3
_DROPOUT = 0.3
_LABEL_SMOOTHING = 0.02
_MAX_NOISE = 0.4
"""Standard deviation of the pixel noise, drawn a row from 0 to this: a classifier that has only seen clean
scans is easy to fool.
"""


def train(seed: int) -> DigitClassifier:
    """The trained classifier; a function of `seed` on one kind of machine."""
    torch.manual_seed(seed)
    scans = half_b()
    # A scan seen on every canvas: reading an image back from a larger one blurs it a little.
    seen = [np.stack([read(render(scan, canvas)) for scan in scans.images]) for canvas in CANVASES]
    images = scans_to_input(np.concatenate(seen))
    labels = torch.from_numpy(np.tile(scans.labels, len(CANVASES)))
    model = DigitClassifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE)
    for _ in range(_STEPS):
        rows = torch.randint(len(labels), (_BATCH,))
        noise = torch.rand(_BATCH, 1, 1, 1) * _MAX_NOISE * torch.randn(_BATCH, 1, 8, 8)
        logits = model(images[rows] + noise, dropout=_DROPOUT)
        loss = F.cross_entropy(logits, labels[rows], label_smoothing=_LABEL_SMOOTHING)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=WEIGHTS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    start = time.perf_counter()
    model = train(arguments.seed)
    save_file(model.state_dict(), arguments.output)
    print(f"trained in {time.perf_counter() - start:.1f} s, wrote {arguments.output}")
    scorer, judge, scans = DigitProbability(str(arguments.output)), DigitJudge(), half_a()
    for canvas in CANVASES:
        images = [render(scan, canvas) for scan in scans.images]
        scores = scorer.score(images, [""] * len(images), [{"digit": int(label)} for label in scans.labels])
        print(
            f"half A at {canvas[0]}x{canvas[1]}: accuracy {scorer.accuracy(images, scans.labels):.4f}, "
            f"mean probability of the label {np.mean(scores):.4f}, "
            f"judge's accuracy {judge.accuracy(images, scans.labels):.4f}"
        )


if __name__ == "__main__":
    main()
