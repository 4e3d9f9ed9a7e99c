# SPDX-License-Identifier: Apache-2.0
"""`report.html`: one file with everything in it, no script, no network.

Whatever came from a run is escaped.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from unirl.metrics import SampleSet
from unirl.report.run_files import RunFiles
from unirl.report.summary import Summary, number, sentence

_STYLE = """
:root { color-scheme: light dark; --ink: #1d1f23; --paper: #ffffff; --soft: #f3f4f6; --line: #d5d8dd;
--accent: #1f5fa8; } @media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8eb; --paper: #15171a; --soft: #20242a; --line: #3a3f47; --accent: #7fb3ee; }
}
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 0 auto;
max-width: 68rem;
  padding: 1.5rem; }
h1 { margin: 0; } h2 { margin-top: 2.2rem; border-bottom: 1px solid var(--line); color: var(--accent); }
.lead { font-size: 1.15rem; }
.numbers { overflow-x: auto; }
table { border-collapse: collapse; margin: .6rem 0; }
th, td { text-align: left; padding: .25rem .9rem .25rem 0; border-bottom: 1px solid var(--line);
vertical-align: top; } td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; } img {
max-width: 100%; height: auto; background: #ffffff; border-radius: 4px; } img.pixels { image-rendering:
pixelated; } .pair { display: flex; flex-wrap: wrap; gap: 1.5rem; } figure { margin: 0; flex: 1 1 24rem; }
figcaption { font-weight: 600; } pre { background: var(--soft); padding: .8rem; white-space: pre-wrap; overflow-wrap: anywhere;
border-radius: 4px; font-size: .85rem; } details > summary { cursor: pointer; color: var(--accent); }
"""


def render(
    run: RunFiles,
    summary: Summary,
    *,
    curves: Path,
    grids: Sequence[tuple[str, Path]],
    prompts: SampleSet | None,
    timeline: Path | None = None,
) -> str:
    """The page as text.

    Args:
        curves: PNG of the curves.
        grids: (caption, PNG) of each grid that there is.
        prompts: the samples of the last evaluation, for the table of scores by prompt.
        timeline: PNG of which rank ran what in the last rollout.
    """
    name = run.folder.resolve().name
    sections = [
        f"<h1>{_escape(name)}</h1>",
        f'<p class="lead">{_escape(sentence(summary))}</p>',
        _section("Before and after", _before_after(summary)),
        _section("Samples on the same seeds", _grids(grids)),
        _section("Curves", _image(curves, "curves of the run")),
        _section("Scores by prompt, last evaluation", _by_prompt(prompts)),
        _section("Checks", _checks(summary)),
        _section("Seconds by phase", _phases(summary)),
        _section("Last rollout, rank by rank", _image(timeline, "timeline of the ranks") if timeline else ""),
        _section("Plan", _preformatted(run.plan)),
        _section("Configuration", _folded("config.yaml", run.config_text)),
        _section("Environment", _environment(run.environment)),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_escape(name)} &ndash; UniRL run</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(section for section in sections if section)
        + "\n</body>\n</html>\n"
    )


def _before_after(summary: Summary) -> str:
    rows = [
        (item.name, number(item.before), number(item.after), _signed(item.change))
        for item in summary.evaluations
    ]
    return _table(("evaluated", "first", "last", "change"), rows)


def _checks(summary: Summary) -> str:
    rows = [
        ("largest |ratio - 1| of a row replayed under its own weights", number(summary.parity_ratio_max)),
        ("largest |Δ log-prob| of such a row", number(summary.dlogp_max)),
        ("largest |mean ratio - 1| of a rollout, all updates", number(summary.mean_ratio_distance_max)),
        ("largest clip fraction", number(summary.clip_max)),
        ("largest staleness, in pushes", number(summary.staleness_max)),
        ("largest policy lag, in optimizer steps", number(summary.policy_lag_max)),
        ("rows dropped (failed or non-finite rewards)", number(summary.dropped_rows)),
        ("optimizer steps skipped (non-finite gradients)", number(summary.skipped_steps)),
    ]
    return _table(("what", "value"), [row for row in rows if row[1] != "n/a"])


def _phases(summary: Summary) -> str:
    rows = [(phase.name, number(phase.median_s), number(phase.total_s)) for phase in summary.phases]
    overlap = "<p>Phases that overlap add up to more than <code>step</code>, the whole rollout.</p>"
    note = overlap if rows else ""
    return _table(("phase", "median a rollout", "whole run"), rows) + note


def _by_prompt(samples: SampleSet | None) -> str:
    if samples is None:
        return ""
    scores: dict[str, list[float]] = {}
    for prompt, score in zip(samples.prompts, samples.scores, strict=True):
        scores.setdefault(prompt, []).append(score)
    rows = []
    for prompt, values in scores.items():
        finite = [value for value in values if value == value]
        mean = sum(finite) / len(finite) if finite else float("nan")
        rows.append((prompt, str(len(values)), number(mean), number(min(finite, default=float("nan")))))
    return _table(("prompt", "images", "mean score", "lowest"), rows)


def _environment(environment: Mapping[str, Any]) -> str:
    rows: list[tuple[str, str]] = []
    for name, value in environment.items():
        if isinstance(value, Mapping):
            rows += [(f"{name}: {part}", str(of)) for part, of in value.items()]
        elif isinstance(value, list):
            rows.append((name, ", ".join(map(str, value)) or "none"))
        else:
            rows.append((name, str(value)))
    return _table(("what", "value"), rows, numbers=False)


def _grids(grids: Sequence[tuple[str, Path]]) -> str:
    figures = [
        f"<figure><figcaption>{_escape(caption)}</figcaption>{_image(path, caption)}</figure>"
        for caption, path in grids
    ]
    return f'<div class="pair">{"".join(figures)}</div>' if figures else ""


def _image(path: Path, description: str) -> str:
    data = base64.b64encode(path.read_bytes()).decode("ascii")
    return f'<img alt="{_escape(description)}" src="data:image/png;base64,{data}">'


def _section(title: str, body: str) -> str:
    return f"<section>\n<h2>{_escape(title)}</h2>\n{body}\n</section>" if body else ""


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: bool = True) -> str:
    body = [
        "<tr>" + "".join(_cell("td", text, numbers and index > 0) for index, text in enumerate(row)) + "</tr>"
        for row in rows
    ]
    if not body:
        return ""
    titles = "".join(_cell("th", text, numbers and index > 0) for index, text in enumerate(head))
    return f'<div class="numbers"><table>\n<tr>{titles}</tr>\n' + "\n".join(body) + "\n</table></div>"


def _cell(tag: str, text: str, number_column: bool) -> str:
    opening = f'<{tag} class="number">' if number_column else f"<{tag}>"
    return f"{opening}{_escape(text)}</{tag}>"


def _preformatted(text: str | None) -> str:
    return f"<pre>{_escape(text)}</pre>" if text else ""


def _folded(title: str, text: str | None) -> str:
    return f"<details><summary>{_escape(title)}</summary>{_preformatted(text)}</details>" if text else ""


def _signed(value: float) -> str:
    return f"+{number(value)}" if value > 0 else number(value)


def _escape(text: str) -> str:
    return html.escape(str(text), quote=True)
