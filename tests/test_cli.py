# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from unirl.cli import main
from unirl.cli_doctor import Check, check_package, check_python, examine, render
from unirl.metrics import JsonlSink


def test_importing_the_command_line_imports_nothing_heavy() -> None:
    code = "import sys, unirl.cli; print([m for m in ('torch', 'numpy', 'ray', 'matplotlib', 'hydra') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_the_doctor_says_what_is_installed_and_whether_the_demo_can_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    import torch

    checks = examine()
    code = main(["doctor"])
    text = capsys.readouterr().out
    assert "torch" in text and torch.__version__ in text
    assert {
        "Python",
        "torch",
        "GPUs",
        "triton",
        "ray",
        "diffusers",
        "transformers",
        "peft",
        "wandb",
        "scikit-learn",
    } <= {check.name for check in checks}
    assert {"cores", "memory", "/dev/shm"} <= {check.name for check in checks}
    assert code == int(any(check.demo and not check.good for check in checks))


def test_everything_missing_comes_with_its_purpose_and_a_command() -> None:
    for check in examine():
        if not check.good:
            assert check.needed_for and check.fix, check
    missing = check_package(
        "no-such-package", "no_such_package_at_all", needed_for="nothing", fix="pip install it", demo=True
    )
    assert not missing.good and missing.prevents_demo
    text = render([missing])
    assert "MISS no-such-package  missing" in text
    assert "needed for: nothing" in text and "get it by:  pip install it" in text
    assert text.endswith("the demo cannot run: no-such-package")


def test_an_optional_package_that_is_missing_does_not_prevent_the_demo() -> None:
    missing = check_package(
        "no-such-package", "no_such_package_at_all", needed_for="nothing", fix="pip install it"
    )
    assert render([missing]).endswith("the demo can run: make demo")


def test_too_old_versions_are_found() -> None:
    old = check_package("pytest", "pytest", needed_for="tests", fix="pip install pytest", oldest=(10**6,))
    assert not old.good and "older than 1000000" in old.found
    assert check_package("pytest", "pytest", needed_for="tests", fix="", oldest=(2, 0)).good
    assert not check_python((3, 10)).good and check_python((3, 11)).good


def test_a_folder_without_a_package_in_it_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "left_by_something").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not check_package("left-by-something", "left_by_something", needed_for="x", fix="y").good


def test_the_doctors_verdict_names_everything_that_prevents_the_demo() -> None:
    checks = [
        Check("one", "missing", False, demo=True, needed_for="a", fix="b"),
        Check("two", "1.0", True, demo=True),
    ]
    assert render(checks).endswith("the demo cannot run: one")


def test_report_writes_the_page_and_prints_its_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.write(0, {"reward": 0.5})
    sink.close()
    assert main(["report", str(tmp_path)]) == 0
    assert Path(capsys.readouterr().out.strip()) == tmp_path / "report.html"
    assert (tmp_path / "report.html").is_file()


@pytest.mark.parametrize(
    "arguments", [["report", "{}"], ["sample", "{}", "--prompt", "a"], ["export", "{}", "--to", "{}/adapter"]]
)
def test_a_folder_that_is_no_run_is_one_line_on_stderr_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert main([argument.format(tmp_path) for argument in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and "is no run directory" in captured.err
    assert captured.err.count("\n") == 1 and not captured.out


@pytest.mark.parametrize("arguments", [["sample", "x", "--prompt", "p", "--num", "0"], ["nonsense"], []])
def test_wrong_arguments_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--out", "grid"], "argument --out: 'grid'; allowed: a file in .png, .jpg, .jpeg"),
        (["--out", "grid.foo"], "argument --out: 'grid.foo'; allowed"),
        (["--prompt", " "], "argument --prompt: it is empty"),
        (
            ["--base", "--checkpoint", "step_000001"],
            "argument --checkpoint: not allowed with argument --base",
        ),
    ],
)
def test_what_sample_cannot_do_is_said_before_anything_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["sample", str(tmp_path / "no run"), "--prompt", "a", *options])
    assert stopped.value.code == 2 and message in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_one_line_on_stderr_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.write(0, {"reward": 0.5})
    sink.close()
    (tmp_path / "curves.png").mkdir()
    assert main(["report", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and "curves.png" in said and said.count("\n") == 1
