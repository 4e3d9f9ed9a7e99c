# SPDX-License-Identifier: Apache-2.0
"""`unirl simulate` and `unirl fit-cost` as a user runs them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from unirl.cli import EXIT_WRONG_INPUT, main
from unirl.schedule.cost import CostModel, cost_from_config
from unirl.schedule.timeline import read_trace
from unirl.schedule.units import Workload


def figures(printed: str) -> dict[str, list[str]]:
    """Rows of the table by schedule."""
    return {line[:24].strip(): line[24:].split() for line in printed.splitlines()[1:]}


def test_the_example_mix_prints_its_known_makespans(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture, trace = tmp_path / "a.png", tmp_path / "a.json"
    assert main(["simulate", "--png", str(picture), "--trace", str(trace)]) == 0
    rows = figures(capsys.readouterr().out)
    assert rows["owner"][0] == "10"
    assert rows["steal, whole groups"][0] == "8"
    assert rows["steal, halves"][0] == "7.25"
    assert rows["steal, quarters"][0] == "6.75"
    assert rows["ideal"] == ["6.281"]
    assert float(rows["steal, adaptive units"][1]) <= 1.03
    assert rows["owner"][2] == "37.2%"  # 1 - 6.28 / 10
    assert Image.open(picture).size[0] > 500
    names = [name for name, _ in read_trace(json.loads(trace.read_text()))]
    assert names[0] == "owner" and names[-1] == "steal, adaptive units"


def test_nothing_is_written_that_was_not_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["simulate"]) == 0
    assert not list(tmp_path.iterdir())


def test_a_dataset_is_read_row_by_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "rows.jsonl"
    canvases = [[1024, 1024], [512, 512], None, [512, 512]]
    rows.write_text(
        "\n".join(
            json.dumps({"prompt": "a", "metadata": {"canvas": canvas} if canvas else {}})
            for canvas in canvases
        )
    )
    picture = str(tmp_path / "a.png")
    assert main(["simulate", "--dataset", str(rows), "--num-ranks", "2", "--png", picture]) == 0
    found = figures(capsys.readouterr().out)
    assert found["owner"][0] == "5"  # 4 + 1 against 1 + 1
    assert found["ideal"] == ["3.5"]
    assert (
        main(["simulate", "--dataset", str(rows), "--num-ranks", "2", "--prompts", "2", "--png", picture])
        == 0
    )
    assert figures(capsys.readouterr().out)["owner"][0] == "4"


def test_a_fitted_cost_weighs_steps_and_calls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cost = tmp_path / "cost.json"
    cost.write_text(json.dumps({"coefficients": {"b": 1e-9}}))
    arguments = ["simulate", "--mix", "1024;512", "--cost", str(cost), "--png", str(tmp_path / "a.png")]
    assert main(arguments) == 0
    assert figures(capsys.readouterr().out)["owner"][0] == "16"  # quadratic in tokens


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mix", "500"], "500"),
        (["--dataset", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--cost", "nowhere.json"], "nowhere.json"),
        (["--samples-per-prompt", "0"], "--samples-per-prompt is 0"),
        (["--dataset", "digits_mixed"], "set --pixel-stride"),
    ],
)
def test_wrong_input_is_said_in_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["simulate", *arguments, "--png", str(tmp_path / "a.png")]) == EXIT_WRONG_INPUT
    assert message in capsys.readouterr().err
    assert not (tmp_path / "a.png").exists()


@pytest.mark.slow
def test_fit_cost_measures_this_machine_and_writes_what_a_recipe_reads(
    random_base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "cost.json"
    arguments = [
        "fit-cost",
        "--config-name",
        "diffusion/digits/digits_mixed",
        "--repeats",
        "2",
        "--out",
        str(out),
    ]
    assert main([*arguments, f"model.path={random_base}"]) == 0
    printed = capsys.readouterr().out
    assert "R^2" in printed and "held-out points" in printed and "worst error" in printed
    cost = cost_from_config(str(out))
    assert isinstance(cost, CostModel)
    # Six times the steps of a larger canvas and more rows take longer, whatever the machine.
    small, large = Workload(16, 2, prefix_tokens=20), Workload(36, 12, prefix_tokens=20)
    assert cost.predict(large, 8) > 3 * cost.predict(small, 1) > 0
    measured = json.loads(out.read_text())["measured"]
    assert measured["model"] == "bagel-digits" and measured["r_squared"] <= 1.0


def test_a_sweep_that_cannot_identify_a_term_is_refused_and_nothing_written(
    random_base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "cost.json"
    arguments = ["fit-cost", "--config-name", "diffusion/digits/digits_mixed", f"model.path={random_base}"]
    sweep = ["--rows", "1", "2", "--steps", "2", "--canvases", "8", "12", "--repeats", "1", "--out", str(out)]
    assert main([*arguments, *sweep]) == EXIT_WRONG_INPUT
    assert "c needs two or more row counts and two or more step counts" in capsys.readouterr().err
    assert not out.exists()


def test_an_unknown_recipe_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit-cost", "--config-name", "diffusion/nothing"]) == EXIT_WRONG_INPUT
    assert "diffusion/nothing" in capsys.readouterr().err
