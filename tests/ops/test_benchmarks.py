# SPDX-License-Identifier: Apache-2.0
"""The operators' benchmarks run, find the operators right, and write rows that say what was measured and where."""

from __future__ import annotations

import argparse
import importlib
import json
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from unirl.models.bagel.layers import make_batch_invariant

FOLDER = Path(__file__).parents[2] / "benchmarks"
OPERATORS = {
    "sibling_prefix_attention": 2e-6,
    "packing": 0,
    "digest": 0,
    "flow": 2e-6,
    "guidance": 2e-6,
}


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def options(bench: ModuleType, folder: Path, *more: str) -> argparse.Namespace:
    return bench.parser("").parse_args(["--quick", "--device=cpu", f"--results={folder}", *more])


@pytest.mark.parametrize("stem", OPERATORS)
def test_quick_run_finds_the_operator_right(stem: str, load: Any, tmp_path: Path) -> None:
    load(f"bench_{stem}").main(["--quick", "--device=cpu", f"--results={tmp_path}"])
    rows = read(tmp_path / f"{stem}.jsonl")
    assert (tmp_path / f"bench_{stem}.png").stat().st_size > 1000
    cases: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        cases.setdefault(f"{row['op']} {row['mode']} {row.get('renorm')}", []).append(row)
    for case in cases.values():
        ours = [row for row in case if row["provider"].startswith("ours")]
        assert ours and all(row["error"] <= OPERATORS[stem] for row in ours)
        assert any("ms" in row for row in case if row not in ours)
    for row in rows:
        assert row["date"] and row["commit"] and row["cpu"] and row["torch"] == torch.__version__
        if "gbps" in row:
            assert row["of_copy"] == pytest.approx(row["gbps"] / 1e3 / row["copy_tbps"], rel=1e-3)


def test_a_peer_that_raises_is_kept_as_missing(load: Any, tmp_path: Path) -> None:
    bench = load("_bench")

    def broken() -> None:
        raise RuntimeError("no such kernel\nsecond line")

    with bench.Bench("broken", options(bench, tmp_path), num_cases=1) as run:
        run.measure("add", "forward", {"N": 1}, {"works": lambda: 1 + 1, "broken": broken}, moved_bytes=8)
    missing, works = read(tmp_path / "broken.jsonl")
    assert missing["missing"] == "RuntimeError: no such kernel" and "ms" not in missing
    assert works["provider"] == "works" and works["ms"] >= 0


def test_rows_measured_before_an_error_are_written(load: Any, tmp_path: Path) -> None:
    bench = load("_bench")
    with (
        pytest.raises(KeyError, match="later"),
        bench.Bench("early", options(bench, tmp_path), num_cases=2) as run,
    ):
        run.measure("add", "forward", {"N": 1}, {"works": lambda: 1 + 1}, moved_bytes=8)
        raise KeyError("later")
    assert len(read(tmp_path / "early.jsonl")) == 1


def test_rounds_end_with_the_seconds_but_not_before_the_third(load: Any) -> None:
    bench = load("_bench")
    slow = {"slow": lambda: time.sleep(0.01)}
    timings = bench.interleaved(slow, torch.device("cpu"), rounds=50, seconds=0.0)
    assert timings["slow"].rounds == 3
    assert timings["slow"].ms >= 10


def test_plots_show_the_newest_rows_and_prefer_a_gpu(load: Any, tmp_path: Path) -> None:
    def row(day: int, hour: int, ms: int, provider: str, **more: Any) -> dict[str, Any]:
        at = f"2026-01-{day:02d}"
        columns = {"op": "x", "mode": "forward", "shape": {"N": 1}, "provider": provider}
        return {"date": at, "at": f"{at}T{hour}", "ms": ms, **columns, **more}

    gpu = {"hardware": "a GPU"}
    rows = [
        row(1, 10, 1, "removed since", **gpu),
        row(2, 10, 2, "a peer", **gpu),
        row(2, 10, 3, "ours", **gpu),
        row(2, 11, 4, "ours", **gpu),
        row(2, 12, 5, "ours", shape={"N": 2}, **gpu),
        row(3, 10, 6, "ours"),
    ]
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert sorted(row["ms"] for row in load("_plots").newest_rows(path)) == [2, 4, 5]


def test_quick_bagel_run_agrees_with_the_plain_decoder(
    load: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    modes = ["denoise", "adapted", "replay", "kept"]
    arguments = ["--quick", "--device=cpu", f"--results={tmp_path}", "--profile", "--no-plot"]
    load("bench_bagel").main([*arguments, f"--modes={','.join(modes)}"])
    rows = read(tmp_path / "bagel.jsonl")
    assert [(row["mode"], row["provider"]) for row in rows] == [
        (m, p) for m in modes for p in ("plain", "ours")
    ]
    assert all(row["error"] < 2e-6 for row in rows if "error" in row)
    assert {row["provider"] for row in rows if "error" in row and row["mode"] in modes[2:]} == {"ours"}
    for row in rows:
        assert row["of_matmul"] == pytest.approx(
            row["tflop"] / row["ms"] * 1e3 / row["matmul_tflops"], rel=1e-3
        )
    assert "replay, 3 x 16, prefix 7, ours" in capsys.readouterr().out


def test_flop_of_bagel_are_those_of_its_matrix_products(load: Any) -> None:
    bench = load("bench_bagel")
    stage = load("_models").random_stage("bagel-digits", "cpu", 4, torch.float32)
    # Batch invariance pads products of few rows.
    stage.model.config = stage.model.config.replace(batch_invariant=False)
    make_batch_invariant(stage.model, False)
    shape = bench.Shape(3, 64, 40)

    def counted(call: Any) -> int:
        with FlopCounterMode(display=False) as counter, sdpa_kernel([SDPBackend.MATH]):
            bench.running(bench.plain_decoder(stage.model), call)()
        return counter.get_total_flops()

    base = bench.flop_of(stage.model.config, shape)
    assert counted(bench.Problem(stage, shape).step) == pytest.approx(base.step, rel=1e-3)
    bench.adapt(stage.model)
    stage.model.gradient_checkpointing = False
    flop = bench.flop_of(stage.model.config, shape, bench.adapter_entries(stage.model))
    problem = bench.Problem(stage, shape)
    assert counted(problem.step) == pytest.approx(flop.step, rel=1e-3)
    # Here the attention keeps its scores, which the half that 2.5 has over 2 would compute again.
    assert counted(problem.replay) == pytest.approx(flop.replay() - 0.5 * flop.attention, rel=2e-2)
    stage.model.gradient_checkpointing = True
    assert counted(problem.replay) == pytest.approx(flop.replay(2) - 0.5 * flop.attention, rel=2e-2)


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("void sibling_attention_forward_kernel<128>", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", "attention"),
        ("nvjet_tst_256x128_64x4_1x2_h_bz_coopA_TNN", "matmul"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "matmul"),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<unsigned int, 4>", "copies, casts"),
        (
            "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda>",
            "copies, casts",
        ),
        ("Memcpy DtoD (Device -> Device)", "copies, casts"),
        ("void at::native::vectorized_elementwise_kernel<4, silu_kernel>", "norms, elementwise"),
        ("void at::native::reduce_kernel<512, 1, MeanOps<float>>", "norms, elementwise"),
    ],
)
def test_kernels_are_grouped_by_their_names(load: Any, name: str, group: str) -> None:
    assert load("_profile").Kernel(name, 1, 1.0).group == group
