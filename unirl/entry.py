# SPDX-License-Identifier: Apache-2.0
"""What the Hydra entry points share: find the recipe, check it, run it, write the report, end with a documented exit code.

Exit codes: 0 done (or `dry_run`); 1 the run failed, with its traceback; 2 the recipe or its input is wrong, said in one
message; 130 interrupted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf

from unirl.config import RunConfig, parse, to_plain
from unirl.report import write_report
from unirl.trainer.diffusion import DiffusionTrainer

EXIT_FAILED = 1
EXIT_WRONG_INPUT = 2
EXIT_INTERRUPTED = 130


def recipes_folder() -> Path:
    """Where the recipes are: the checkout's `examples`, or the copy inside an installed package."""
    package = Path(__file__).resolve().parent
    checkout = package.parent / "examples"
    return checkout if (checkout / "diffusion").is_dir() else package / "recipes"


def main(trainer_class: Callable[[RunConfig], DiffusionTrainer]) -> None:
    """Parses the command line by Hydra and runs the recipe; ends the process with the exit code."""
    recipes: list[Any] = []

    @hydra.main(version_base="1.3", config_path=str(recipes_folder()))
    def read(recipe: DictConfig) -> None:
        recipes.append(OmegaConf.to_container(recipe, resolve=True))

    # Any key of the schema may be set, whether or not the recipe mentions it; the parser knows which ones exist.
    asked = [
        "++" + a if "=" in a and a[0].isalpha() and not a.startswith("hydra") else a for a in sys.argv[1:]
    ]
    # Hydra would make a folder and log files of its own; the run directory is ours.
    sys.argv[1:] = [
        *asked,
        "hydra.run.dir=.",
        "hydra.output_subdir=null",
        "hydra/job_logging=disabled",
        "hydra/hydra_logging=disabled",
    ]
    read()
    # Run outside Hydra, which would shorten tracebacks. With --cfg there is nothing to run.
    sys.exit(run_recipe(recipes[0], trainer_class) if recipes else 0)


def run_recipe(recipe: Any, trainer_class: Callable[[RunConfig], DiffusionTrainer]) -> int:
    """Runs a plain recipe; returns the exit code."""
    try:
        config = parse(RunConfig, recipe)
        trainer = trainer_class(config)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_WRONG_INPUT
    if config.dry_run:
        print(trainer.plan.text)
        print(OmegaConf.to_yaml(OmegaConf.create(to_plain(config))), end="")
        return 0
    try:
        folder = trainer.run()
    except KeyboardInterrupt:
        print("interrupted; the run directory can be resumed with resume: auto", file=sys.stderr)
        return EXIT_INTERRUPTED
    print(f"report: {write_report(folder)}")
    return 0
