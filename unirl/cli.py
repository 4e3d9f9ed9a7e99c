# SPDX-License-Identifier: Apache-2.0
"""`unirl`: doctor, report, sample, export, parity, simulate, fit-cost. Heavy imports happen inside the command that needs them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from unirl.cli_parity import add_command as add_parity_command
from unirl.cli_schedule import add_commands as add_schedule_commands

EXIT_FAILED = 1
EXIT_WRONG_INPUT = 2

PICTURE_SUFFIXES = (".png", ".jpg", ".jpeg")
CHECKPOINT_HELP = "name or path of a checkpoint (default: the adapter, else the newest)"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns 0, 1 when the doctor found the demo cannot run, or 2 for wrong input or a file
    that cannot be read or written (said on stderr).
    """
    options = build_parser().parse_args(arguments)
    try:
        return int(options.command(options))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_WRONG_INPUT


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="unirl", description="RL post-training of diffusion models.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    doctor = commands.add_parser(
        "doctor", help="what is installed, built and visible; how to get what is missing"
    )
    doctor.set_defaults(command=_doctor)

    report = commands.add_parser("report", help="write curves, grids and report.html of a run")
    report.add_argument("run", type=Path, metavar="RUN", help="run directory")
    report.set_defaults(command=_report)

    sample = commands.add_parser("sample", help="generate images with a run's trained weights")
    sample.add_argument("run", type=Path, metavar="RUN", help="run directory")
    sample.add_argument("--prompt", type=_text, required=True, help='for example "a handwritten three"')
    sample.add_argument(
        "--num", type=_positive, default=8, help="images, each from a noise of its own (default 8)"
    )
    sample.add_argument("--seed", type=int, default=0, help="the same seed gives the same images (default 0)")
    sample.add_argument(
        "--canvas",
        type=_positive,
        nargs=2,
        metavar=("HEIGHT", "WIDTH"),
        help="pixels (default: the recipe's)",
    )
    sample.add_argument("--steps", type=_positive, help="denoising steps (default: the recipe's)")
    sample.add_argument(
        "--out", type=_picture, default=Path("samples.png"), help="a PNG or JPEG (default samples.png)"
    )
    weights = sample.add_mutually_exclusive_group()
    weights.add_argument("--base", action="store_true", help="the weights before training")
    weights.add_argument("--checkpoint", type=Path, help=CHECKPOINT_HELP)
    sample.set_defaults(command=_sample)

    checkpoints = commands.add_parser(
        "checkpoints", help="list a run's checkpoints and verify every byte of them"
    )
    checkpoints.add_argument("run", type=Path, metavar="RUN", help="run directory")
    checkpoints.set_defaults(command=_checkpoints)

    export = commands.add_parser("export", help="write a run's adapter as plain peft loads it")
    export.add_argument("run", type=Path, metavar="RUN", help="run directory")
    export.add_argument("--to", type=Path, required=True, metavar="DIR", help="folder to write; new or empty")
    export.add_argument("--checkpoint", type=Path, help=CHECKPOINT_HELP)
    export.set_defaults(command=_export)

    add_parity_command(commands)
    add_schedule_commands(commands)
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number}; allowed: 1 or more")
    return number


def _text(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("it is empty; allowed: a text")
    return text


def _picture(text: str) -> Path:
    path = Path(text)
    if path.suffix.lower() not in PICTURE_SUFFIXES:
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: a file in {', '.join(PICTURE_SUFFIXES)}")
    return path


def _doctor(options: argparse.Namespace) -> int:
    from unirl.cli_doctor import examine, render

    checks = examine()
    print(render(checks))
    return EXIT_FAILED if any(check.prevents_demo for check in checks) else 0


def _report(options: argparse.Namespace) -> int:
    from unirl.report import write_report

    print(write_report(options.run))
    return 0


def _sample(options: argparse.Namespace) -> int:
    import torch

    from unirl.cli_model import load_recipe, sample_images
    from unirl.report.grids import grid_image

    torch.set_num_threads(load_recipe(options.run).threads_per_worker)  # as the run's own evaluations

    images = sample_images(
        options.run,
        prompt=options.prompt,
        num=options.num,
        seed=options.seed,
        canvas=tuple(options.canvas) if options.canvas else None,
        steps=options.steps,
        base=options.base,
        checkpoint=options.checkpoint,
    )
    options.out.parent.mkdir(parents=True, exist_ok=True)
    grid_image(images, [options.prompt] * len(images), max_columns=8).save(options.out)
    print(options.out)
    return 0


def _checkpoints(options: argparse.Namespace) -> int:
    from unirl.cli_checkpoints import checkpoints_table

    table, all_whole = checkpoints_table(options.run)
    print(table)
    return 0 if all_whole else EXIT_FAILED


def _export(options: argparse.Namespace) -> int:
    from unirl.cli_model import export_adapter

    print(export_adapter(options.run, options.to, checkpoint=options.checkpoint))
    return 0


if __name__ == "__main__":
    sys.exit(main())
