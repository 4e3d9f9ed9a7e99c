# SPDX-License-Identifier: Apache-2.0
"""The cost model: prediction, fit, refusal, correction."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unirl.schedule.cost import CostModel, RankCorrection, TokenCount, cost_from_config
from unirl.schedule.fit import Measurement, fit_cost
from unirl.schedule.units import Workload

TRUE = CostModel(a=2e-8, b=3e-12, g=1.5e-12, c=4e-3, d=1e-6, e=2e-10, f=0.03)


def sweep(
    model: CostModel,
    *,
    tokens: tuple[int, ...] = (1024, 2304, 4096),
    prefixes: tuple[int, ...] = (64, 2400),
    steps: tuple[int, ...] = (5, 20),
    rows: tuple[int, ...] = (1, 4, 8),
    sources: tuple[int, ...] = (0, 1024, 4096),
    noise: float = 0.0,
) -> list[Measurement]:
    rng = random.Random(0)
    points = []
    for count, prefix, num_steps, num_rows, source in itertools.product(
        tokens, prefixes, steps, rows, sources
    ):
        workload = Workload(count, num_steps, 2, prefix, source)
        seconds = model.predict(workload, num_rows) * (1 + noise * rng.uniform(-1, 1))
        points.append(Measurement(workload, num_rows, seconds))
    return points


def test_the_cost_of_a_unit_is_the_formula() -> None:
    """t = steps * branches * (n (a L + b L^2 + g L P) + c) + (d Ls + e Ls^2) + f, by hand."""
    model = CostModel(a=2.0, b=3.0, g=5.0, c=7.0, d=11.0, e=13.0, f=17.0)
    workload = Workload(tokens=4, steps=3, branches=2, prefix_tokens=6, source_tokens=5)
    expected = 3 * 2 * (9 * (2 * 4 + 3 * 16 + 5 * 4 * 6) + 7) + (11 * 5 + 13 * 25) + 17
    assert model.predict(workload, 9) == expected
    per_row, per_call = model.affine(workload)
    assert 9 * per_row + per_call == expected


def test_exact_data_gives_the_coefficients_back_to_1e_6() -> None:
    report = fit_cost(sweep(TRUE))
    for name, value in asdict(TRUE).items():
        assert getattr(report.model, name) == pytest.approx(value, rel=1e-6), name
    assert report.r_squared == pytest.approx(1.0, abs=1e-9)
    assert report.worst_error < 1e-6
    assert report.zeroed == ()


@pytest.mark.parametrize(
    ("narrow", "unidentified", "missing"),
    [
        ({"tokens": (1024,)}, "a, b", "two or more canvases"),
        ({"prefixes": (64,)}, "a, g", "two or more prefix lengths"),
        ({"steps": (5,)}, "c, f", "two or more step counts"),
        ({"rows": (4,), "steps": (5,)}, "c, f", "two or more row counts"),
        ({"sources": (0, 1024)}, "d, e", "source images of two or more sizes"),
    ],
)
def test_a_sweep_that_cannot_identify_a_term_is_refused_naming_what_is_missing(
    narrow: dict[str, tuple[int, ...]], unidentified: str, missing: str
) -> None:
    with pytest.raises(ValueError, match=missing) as refused:
        fit_cost(sweep(TRUE, **narrow))
    assert f"cannot identify {unidentified} of" in str(refused.value)


def test_a_sweep_with_fewer_points_than_terms_is_refused() -> None:
    with pytest.raises(ValueError, match="sweep of 3 points cannot identify"):
        fit_cost(sweep(TRUE)[:3])
    with pytest.raises(ValueError, match="sweep of 0 points cannot identify"):
        fit_cost([])


def test_without_source_images_their_terms_are_left_out_and_rows_with_them_refused() -> None:
    report = fit_cost(sweep(TRUE, sources=(0,)))
    assert report.model.d is None and report.model.e is None
    assert set(report.model.to_config()) == {"a", "b", "g", "c", "f"}
    assert report.model.a == pytest.approx(TRUE.a, rel=1e-6)
    with pytest.raises(ValueError, match="no d and e"):
        report.model.affine(Workload(1024, source_tokens=256))


def test_a_model_with_source_images_needs_them_in_the_sweep() -> None:
    with pytest.raises(ValueError, match="d needs source images"):
        fit_cost(sweep(TRUE, sources=(0,)), source_images=True)


def test_noisy_data_gives_no_negative_coefficient() -> None:
    """The true b, g, c and f are 0, so plain least squares would make about half of them negative."""
    truth = CostModel(a=1e-7, d=1e-6, e=1e-10)
    report = fit_cost(sweep(truth, noise=0.2))
    assert min(value for value in asdict(report.model).values() if value is not None) >= 0
    assert report.zeroed
    assert report.model.predict(Workload(1024, 10), 4) == pytest.approx(
        truth.predict(Workload(1024, 10), 4), rel=0.15
    )
    assert "negative" in report.summary()


def test_a_model_that_predicts_held_out_points_worse_than_token_count_says_so() -> None:
    """Time that is exactly proportional to tokens, and a sweep of eight noisy points to fit seven terms to."""
    truth = CostModel(a=1e-7)
    points = sweep(truth, sources=(0,), noise=0.5)
    held_out = sweep(truth, sources=(0,), tokens=(9216, 16384))
    report = fit_cost(points[::3], held_out=held_out)
    assert report.beats_token_count is False
    assert "leave reward_stack.cost unset" in report.summary()


def test_a_model_beats_token_count_where_attention_counts() -> None:
    report = fit_cost(sweep(TRUE, noise=0.05), held_out=sweep(TRUE, tokens=(1600, 6400)))
    assert report.beats_token_count is True
    assert report.held_out_error is not None and report.held_out_error < 0.05
    assert "unset" not in report.summary()


def test_a_measurement_that_is_not_a_time_is_refused() -> None:
    for seconds in (0.0, -1.0, float("nan"), float("inf")):
        points = sweep(TRUE)
        points[3] = replace(points[3], seconds=seconds)
        with pytest.raises(ValueError, match="positive and finite"):
            fit_cost(points)


def test_without_coefficients_the_cost_is_the_token_count() -> None:
    assert cost_from_config(None) == TokenCount()
    assert TokenCount().affine(Workload(2304, steps=10, branches=2)) == (46_080.0, 0.0)


def test_coefficients_come_from_the_recipe_or_from_a_file_it_names(tmp_path: Path) -> None:
    config = TRUE.to_config()
    assert cost_from_config(config) == TRUE
    path = tmp_path / "h200.json"
    path.write_text(json.dumps({"coefficients": config, "measured": {"device": "one core"}}))
    assert cost_from_config(str(path)) == TRUE


def test_wrong_coefficients_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"unknown coefficients \['h'\]; allowed are a, b, g, c, d, e, f"):
        cost_from_config({"a": 1.0, "h": 1.0})
    with pytest.raises(ValueError, match="b must not be negative"):
        cost_from_config({"b": -1.0})
    with pytest.raises(ValueError, match=r"missing\.json, which cannot be read"):
        cost_from_config(str(tmp_path / "missing.json"))
    (tmp_path / "list.json").write_text("[1, 2]")
    with pytest.raises(ValueError, match="does not hold a table"):
        cost_from_config(str(tmp_path / "list.json"))


def test_a_rank_twice_as_slow_is_found_whatever_the_unit_of_cost() -> None:
    for unit in (1.0, 1e-6):
        correction = RankCorrection(3)
        assert correction.factor(0) == 1.0
        for _ in range(50):
            for rank, slowness in enumerate((1.0, 1.0, 2.0)):
                correction.update(rank, predicted=8.0, measured=8.0 * unit * slowness)
        assert correction.factor(2) / correction.factor(0) == pytest.approx(2.0)
        assert correction.ratio(2) == pytest.approx(2.0 * unit)


def test_a_rank_that_slows_down_is_noticed() -> None:
    correction = RankCorrection(2)
    for seconds in [1.0] * 100 + [3.0] * 30:
        correction.update(0, predicted=1.0, measured=seconds)
    # The weight of what is older than 30 assignments is 0.9^30 = 4 %.
    assert correction.ratio(0) == pytest.approx(3.0, rel=0.05)


@given(st.lists(st.tuples(st.integers(0, 2), st.floats(0.1, 10), st.floats(0.1, 10)), max_size=30))
def test_the_factors_are_relative_to_all_ranks_together(updates: list[tuple[int, float, float]]) -> None:
    correction = RankCorrection(3, decay=0.5)
    predicted, measured = [0.0] * 3, [0.0] * 3
    for rank, cost, seconds in updates:
        correction.update(rank, predicted=cost, measured=seconds)
        predicted[rank] = 0.5 * predicted[rank] + cost
        measured[rank] = 0.5 * measured[rank] + seconds
    for rank in range(3):
        if predicted[rank]:
            pooled = sum(measured) / sum(predicted)
            assert correction.factor(rank) == pytest.approx(measured[rank] / predicted[rank] / pooled)
        else:
            assert correction.factor(rank) == 1.0
