# SPDX-License-Identifier: Apache-2.0
"""The picture of which rank ran what."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from unirl.report.timeline import draw_timelines, write_run_timeline
from unirl.schedule.timeline import Call, CallTimeline, chrome_trace

LARGE, SMALL = "#f28e2b", "#4c9be8"  # second and first canvas by size


def timeline() -> CallTimeline:
    """Rank 0 works for 3 of 4 seconds on a large canvas, rank 1 for 4 on small ones, half of it stolen."""
    return CallTimeline(
        (
            Call(0, 100.0, 103.0, "generate", "g0", 4, "1024x1024"),
            Call(0, 102.0, 102.5, "score", "g0", 4, "1024x1024"),
            Call(1, 100.0, 102.0, "generate", "g1", 4, "512x512"),
            Call(1, 102.0, 104.0, "generate", "g2", 4, "512x512", stolen=True),
        ),
        2,
    )


def share_of(path: Path, colour: str) -> float:
    pixels = np.asarray(Image.open(path).convert("RGB")).reshape(-1, 3)
    wanted = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return float((pixels == wanted).all(axis=1).mean())


def test_bars_have_the_length_and_colour_of_their_calls(tmp_path: Path) -> None:
    path = draw_timelines([("a", timeline())], tmp_path / "a.png", unit="s")
    large, small = share_of(path, LARGE), share_of(path, SMALL)
    assert large > 0.05
    # 2 s of plain small bar and 2 s of hatched ones against 3 s of large ones.
    assert 2 / 3 < small / large < 4 / 3 * 1.1


def test_a_run_without_timelines_has_no_picture(tmp_path: Path) -> None:
    assert write_run_timeline(tmp_path) is None


def test_the_last_rollout_of_a_run_is_drawn(tmp_path: Path) -> None:
    folder = tmp_path / "timeline"
    folder.mkdir()
    (folder / "rollout_000000.json").write_text("not read")
    (folder / "rollout_000001.json").write_text(json.dumps(chrome_trace([("r1.p0 .. r1.p2", timeline())])))
    path = write_run_timeline(tmp_path)
    assert path is not None and share_of(path, LARGE) > 0.05


def test_a_broken_timeline_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    folder = tmp_path / "timeline"
    folder.mkdir()
    for text in ("{", "{}"):
        (folder / "rollout_000000.json").write_text(text)
        with pytest.raises(ValueError, match=r"rollout_000000\.json cannot be read"):
            write_run_timeline(tmp_path)
