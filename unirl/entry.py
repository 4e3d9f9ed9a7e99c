# SPDX-License-Identifier: Apache-2.0
"""What the entry points share: find the recipe, check it, run it, write the report, end with a documented exit code.

| code | |
|---|---|
| 0 | done, or `dry_run` |
| 1 | the run failed; its traceback is shown |
| 2 | the recipe, its input or the cluster is not as it has to be; said in one message |
| 3 | a worker died or hung, or the Ray cluster was lost; resume |
| 4 | a checkpoint or another file of the run could not be written, and `checkpoint.on_error` is `stop`; make room and resume |
| 130, 143 | interrupted (SIGINT), terminated (SIGTERM); resume |
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from ray.exceptions import RayTaskError

from unirl.config import RunConfig, parse, to_plain
from unirl.distributed.cluster import is_abandoned
from unirl.distributed.failures import ClusterLost, Refusal, WorkerFailure, WriteFailed
from unirl.report import write_report
from unirl.train.checkpoint import latest_checkpoint
from unirl.trainer.diffusion import DiffusionTrainer

EXIT_FAILED = 1
EXIT_WRONG_INPUT = 2
EXIT_WORKER_LOST = 3
EXIT_WRITE_FAILED = 4
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143

_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)


class Terminated(BaseException):
    """SIGTERM: ends a run as Ctrl-C does."""


def main(trainer_class: Callable[[RunConfig], DiffusionTrainer]) -> None:
    """Reads the command line and runs the recipe; ends the process with the exit code."""
    try:
        recipe = read_recipe(sys.argv[1:])
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_WRONG_INPUT)
    if recipe is None:
        sys.exit(0)
    code = run_recipe(recipe, trainer_class)
    sys.stdout.flush()
    sys.stderr.flush()
    if is_abandoned():
        os._exit(code)  # without Ray's farewell to a cluster that is gone, for which it waits a minute
    sys.exit(code)


# ---- the recipe


def recipes_folder() -> Path:
    """Where the recipes are: the checkout's `examples`, or the copy inside an installed package."""
    package = Path(__file__).resolve().parent
    checkout = package.parent / "examples"
    return checkout if (checkout / "diffusion").is_dir() else package / "recipes"


def read_recipe(arguments: Sequence[str]) -> Any | None:
    """The plain recipe that the command line names; None when it was only to be printed.

    Recipes are composed by Hydra and never instantiated: whatever a file says under `hydra` or `_target_`, no code of it runs.
    """
    parser = argparse.ArgumentParser(
        description="Trains the recipe NAME. Any key of it may be set, for example num_rollouts=20 optim.lr=5e-4.",
        epilog=f"Recipes are in {recipes_folder()}; --config-name=diffusion/digits/digits_async is one.",
    )
    parser.add_argument("--config-name", "-cn", metavar="NAME", required=True)
    parser.add_argument("--config-dir", "-cd", metavar="DIR", help="a folder with recipes of your own")
    parser.add_argument("--cfg", "-c", choices=["job"], help="print the recipe and stop")
    parser.add_argument("--resolve", action="store_true", help="with --cfg: references resolved")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_intermixed_args(list(arguments))
    for override in options.overrides:
        if re.match(r"[+~]*hydra\b", override):
            raise ValueError(
                f"{override!r} sets a key of Hydra, which only composes recipes here and runs nothing; allowed: keys of the recipe "
                "(--config-dir for recipes of your own)"
            )
    # Any key of the schema may be set, whether or not the recipe mentions it; the parser knows which ones exist.
    overrides = ["++" + o if "=" in o and o[0].isalpha() else o for o in options.overrides]
    OmegaConf.register_new_resolver("oc.env", _variable, replace=True)
    name = options.config_name.removesuffix(".yaml")
    folders = [recipes_folder()]
    if options.config_dir:
        folders.insert(0, Path(options.config_dir).resolve())
    _check_recipe_name(name, folders)
    folders.sort(key=lambda folder: not (folder / f"{name}.yaml").is_file())
    overrides.append(f"hydra.searchpath=[{','.join(f'file://{folder}' for folder in folders[1:])}]")
    with hydra.initialize_config_dir(version_base="1.3", config_dir=str(folders[0])):
        recipe = hydra.compose(name, overrides)
    if options.cfg:
        print(OmegaConf.to_yaml(recipe, resolve=options.resolve), end="")
        return None
    return OmegaConf.to_container(recipe, resolve=True)


def _check_recipe_name(name: str, folders: Sequence[Path]) -> None:
    """Raises `ValueError` with the names that there are, unless one of the folders holds the recipe."""
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"--config-dir: {folder} is no folder")
        if (folder / f"{name}.yaml").is_file():
            return
    known = [p.relative_to(f).with_suffix("").as_posix() for f in folders for p in sorted(f.rglob("*.yaml"))]
    by_last_part = {recipe.rsplit("/", 1)[-1]: recipe for recipe in known}
    close = difflib.get_close_matches(name.rsplit("/", 1)[-1], by_last_part, n=1)
    hint = f"; did you mean {by_last_part[close[0]]}?" if close else ""
    raise ValueError(
        f"--config-name is {name!r}; recipes in {' and '.join(map(str, folders))}: {', '.join(known) or 'none'}{hint}"
    )


def _variable(name: str, default: str | None = None) -> str | None:
    """`${oc.env:NAME}`, but no secret: a run's recipe is saved, reported and sent to where its metrics go."""
    if _SECRET.search(name):
        raise ValueError(f"the recipe reads the variable {name}, whose name is that of a secret; take it out")
    value = os.environ.get(name, default)
    if value is None:
        raise ValueError(f"the recipe reads the variable {name}, which is not set; set it, or give a default")
    return value


# ---- the run


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
        with _signals():
            folder = trainer.run()
    except BaseException as error:
        return _told(error, config)
    try:
        print(f"report: {write_report(folder)}")
    except (ValueError, OSError) as error:
        print(
            f"warning: the run is done, but has no report: {error}\nunirl report {folder} writes one",
            file=sys.stderr,
        )
    return 0


@contextmanager
def _signals() -> Iterator[None]:
    """SIGTERM ends the run as SIGINT does; the first of either says what it waits for, a second one ends the waiting."""

    def end(number: int, frame: Any) -> None:
        print(
            "\nending: what is in flight comes to its end first; once more to end at once",
            file=sys.stderr,
            flush=True,
        )
        signal.signal(signal.SIGINT, signal.default_int_handler)
        raise KeyboardInterrupt if number == signal.SIGINT else Terminated

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _told(error: BaseException, config: RunConfig) -> int:
    """Says what ended the run and how to go on; the exit code."""
    if isinstance(error, KeyboardInterrupt):
        said, code = "interrupted", EXIT_INTERRUPTED
    elif isinstance(error, Terminated):
        said, code = "terminated", EXIT_TERMINATED
    elif isinstance(error, (WorkerFailure, ClusterLost)):
        said, code = str(error), EXIT_WORKER_LOST
    elif isinstance(error, WriteFailed):
        said, code = str(error), EXIT_WRITE_FAILED
    elif isinstance(error, Refusal):
        print(f"error: {error}", file=sys.stderr)
        return EXIT_WRONG_INPUT
    else:
        traceback.print_exception(error)
        said, code = f"the run failed: {_cause(error)}", EXIT_FAILED
    if code != EXIT_FAILED:
        said = "\n".join([said, *getattr(error, "__notes__", [])])
    print(f"error: {said}\n{how_to_go_on(config)}", file=sys.stderr)
    return code


def _cause(error: BaseException) -> str:
    """Type and message of an error; of one that a worker sent, those of what it raised."""
    while isinstance(error, RayTaskError) and isinstance(error.cause, BaseException):
        error = error.cause
    return "".join(traceback.format_exception_only(error)).strip()


def how_to_go_on(config: RunConfig) -> str:
    """One line on resuming the run in its folder."""
    folder = Path(config.run_dir)
    newest = latest_checkpoint(folder / "checkpoints")
    if newest is None:
        return (
            f"{folder} holds no checkpoint (save_interval), so there is nothing to go on from: "
            "set another run_dir, or start again in this one with resume=auto"
        )
    return f"the same command with resume=auto goes on from {newest}"
