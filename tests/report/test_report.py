# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import base64
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from unirl.metrics import JsonlSink, write_samples
from unirl.report import load_run, write_report
from unirl.report.curves import write_curves
from unirl.report.summary import sentence, summarise

NASTY = 'a <script>alert("x")</script> & a "three"'


class Page(HTMLParser):
    """Collects what a browser would load, and the text that it would show."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action")]

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run of four rollouts with two evaluations of two prompts on two canvases."""
    folder = tmp_path / "my run"
    now = iter(range(100, 200, 3))
    sink = JsonlSink(folder / "metrics.jsonl", clock=lambda: float(next(now)))
    sink.write(0, {"eval/reward": 0.4, "eval/svm": 0.43, "eval/diversity": 4.9, "eval/version": 0})
    for step in range(4):
        sink.write(
            step,
            {
                "reward": 0.3 + step / 10,
                "reward/digit": 0.3 + step / 10,
                "ratio": 1.0 + step * 1e-9,
                "parity/abs_ratio_minus_one_max": step * 2e-9,
                "parity/abs_dlogp_max": step * 2e-9,
                "clip": 0.1,
                "clip_max": 0.4,
                "gn": math.inf if step == 2 else 0.002,
                "perf/generate_s": [1.0, 2.0, 3.0, 10.0][step],
                "perf/train_s": 0.5,
                "perf/step_s": 3.0,
                "async/staleness": step % 2,
                "async/policy_lag": 2 * (step % 2),
                "rows/dropped": step,
            },
        )
    sink.write(4, {"eval/reward": 0.85, "eval/svm": 0.9, "eval/diversity": 3.5, "eval/version": 4})
    sink.close()
    random = np.random.default_rng(0)
    for step in (0, 4):
        images = [random.integers(0, 256, (8 + 4 * (row % 2), 8, 1), dtype=np.uint8) for row in range(6)]
        prompts = [NASTY if row < 3 else "a handwritten four" for row in range(6)]
        ids = [f"e.p{row // 3}/{row % 3}" for row in range(6)]
        write_samples(folder / f"samples/eval_{step:06d}.npz", images, prompts, ids, [0.5] * 5 + [math.nan])
    (folder / "config.yaml").write_text(
        f"seed: 7\neval:\n  grid_rows: 10\n  grid_columns: 2\nnote: '{NASTY}'\n"
    )
    (folder / "plan.txt").write_text("4 rollouts of 2 prompts <here>\n")
    (folder / "environment.json").write_text(json.dumps({"torch": "x.y", "cores": 2}))
    return folder


def test_the_report_needs_no_network_and_runs_no_script(run_dir: Path) -> None:
    page = Page(write_report(run_dir).read_text())
    assert "script" not in page.tags and "link" not in page.tags
    assert page.links and all(link.startswith("data:image/png;base64,") for link in page.links)
    assert "url(" not in (run_dir / "report.html").read_text()


def test_what_came_from_the_run_is_shown_as_text(run_dir: Path) -> None:
    page = Page(write_report(run_dir).read_text())
    text = "".join(page.words)
    assert text.count(NASTY) == 2  # the table of prompts, and the configuration
    assert "4 rollouts of 2 prompts <here>" in text and "seed: 7" in text and "x.y" in text


def test_the_report_shows_before_and_after_and_the_checks(run_dir: Path) -> None:
    text = " ".join(" ".join(Page(write_report(run_dir).read_text()).words).split())
    assert "4 rollouts; the evaluation reward rose from 0.4 to 0.85." in text
    assert "eval/svm 0.43 0.9 +0.47" in text and "eval/diversity 4.9 3.5 -1.4" in text
    assert "largest |ratio - 1| of a row replayed under its own weights 6.0e-09" in text
    assert "largest clip fraction 0.4" in text and "rows dropped (failed or non-finite rewards) 6" in text
    assert (
        "generate 2.5 16" in text and "train 0.5 2" in text and "step 3 12" in text
    )  # medians and totals of the seconds above


def test_images_in_the_report_are_the_curves_and_the_grids_of_the_first_and_last_evaluation(
    run_dir: Path,
) -> None:
    text = write_report(run_dir).read_text()
    embedded = [base64.b64decode(data) for data in re.findall(r"base64,([^\"]+)", text)]
    grids = [
        f"samples/grid_{when}_{canvas}.png" for canvas in ("8x8", "12x8") for when in ("before", "after")
    ]
    assert embedded == [(run_dir / name).read_bytes() for name in [*grids, "curves.png"]]
    assert (
        "before (evaluation at rollout 0, 8 x 8)" in text
        and "after (evaluation at rollout 4, 12 x 8)" in text
    )


def test_a_run_of_one_canvas_has_one_pair_of_grids(run_dir: Path) -> None:
    for step in (0, 4):
        images = [np.full((8, 8, 1), step, dtype=np.uint8)] * 2
        write_samples(
            run_dir / f"samples/eval_{step:06d}.npz", images, ["four"] * 2, ["e.p0/0", "e.p0/1"], [0.5, 0.6]
        )
    text = write_report(run_dir).read_text()
    assert sorted(p.name for p in (run_dir / "samples").glob("*.png")) == [
        "grid_after.png",
        "grid_before.png",
    ]
    assert "before (evaluation at rollout 0)" in text and "after (evaluation at rollout 4)" in text


def test_a_report_can_be_written_again_while_the_run_goes_on(run_dir: Path) -> None:
    write_report(run_dir)
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "eval/reward": 0.9}\n{"step": 6, "rew')
    assert "to 0.9." in write_report(run_dir).read_text()
    assert not [entry.name for entry in run_dir.iterdir() if entry.name.endswith(".tmp")]


def test_an_axis_shows_its_values_and_no_offset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    for step, tail in enumerate((1.00001, 1.00002, 1.00003)):
        sink.write(step, {"perf/tail_ratio": tail, "parity/abs_dlogp_max": 1e-8})
    sink.close()
    figures: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (figures.append(self), save(self, *a, **k)))
    write_curves(load_run(tmp_path), tmp_path / "curves.png")
    (figure,) = figures
    assert [axes.yaxis.get_offset_text().get_text() for axes in figure.axes] == ["", ""]
    labels = [label.get_text() for label in figure.axes[1].get_yticklabels()]
    assert "1.00002" in {label[:7] for label in labels}


def test_a_run_without_evaluations_or_samples_still_has_a_report(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.write(0, {"reward": math.nan, "ratio": 1.0})
    sink.close()
    text = write_report(tmp_path).read_text()
    assert "1 rollout; no evaluation was logged" in text and "Samples on the same seeds" not in text


def test_a_run_of_nothing_yet_has_a_report(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    assert "0 rollouts" in write_report(tmp_path).read_text()
    assert Image.open(tmp_path / "curves.png").width > 100


@pytest.mark.parametrize("make", [lambda path: None, lambda path: path.mkdir()])
def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, make) -> None:
    make(tmp_path / "empty")
    with pytest.raises(ValueError, match=r"empty is no run directory: it has no metrics\.jsonl"):
        write_report(tmp_path / "empty")


def test_non_finite_values_neither_count_nor_break_the_summary(run_dir: Path) -> None:
    summary = summarise(load_run(run_dir))
    assert summary.num_rollouts == 4
    assert summary.staleness_max == 1 and summary.policy_lag_max == 2
    assert math.isnan(summary.skipped_steps)
    steps, values = load_run(run_dir).series("gn")
    assert steps == [0, 1, 2, 3] and math.isnan(values[2])


def test_a_reward_that_fell_is_said_to_have_fallen(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 0, "eval/reward": 0.5}\n{"step": 9, "eval/reward": 0.25}\n'
    )
    assert "fell from 0.5 to 0.25" in sentence(summarise(load_run(tmp_path)))


@pytest.mark.parametrize("content", [b"", b"- a\n", b"a: [1\n", b"a: \xff\n"])
def test_a_damaged_recipe_is_named(run_dir: Path, content: bytes) -> None:
    (run_dir / "config.yaml").write_bytes(content)
    with pytest.raises(ValueError, match=r"config\.yaml is not the recipe that a run saved"):
        write_report(run_dir)
