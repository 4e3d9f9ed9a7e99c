# SPDX-License-Identifier: Apache-2.0
"""Scorers by the name a recipe gives them."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from unirl.config import ScorerConfig
from unirl.protocols import Scorer
from unirl.reward.digit_judge import DigitJudge
from unirl.reward.digit_probability import DigitProbability
from unirl.reward.jpeg_compressibility import JpegCompressibility

BUILT_IN: Mapping[str, type] = {
    scorer.name: scorer for scorer in (DigitProbability, DigitJudge, JpegCompressibility)
}
"""Names without a colon. Any other scorer is `module:Class`, importable by every worker."""


def check_scorers(configs: Sequence[ScorerConfig], key: str = "reward.scorers") -> None:
    """Everything that can be known to be wrong before a worker starts; loads no weights.

    A scorer class may have a static `check(**options)` that raises when its options cannot work or a file is
    missing.

    Raises:
        ValueError: an unknown name (the nearest is suggested), a name twice, an option the scorer does not
        take, a
            missing weights file.
    """
    seen: set[str] = set()
    for index, config in enumerate(configs):
        where = f"{key}[{index}]"
        if config.name in seen:
            raise ValueError(f"{where}.name is {config.name!r} again; allowed: each scorer once")
        seen.add(config.name)
        scorer = _find(config.name, where)
        _check_options(scorer, config, where)
        if hasattr(scorer, "check"):
            scorer.check(**config.options)


def build_scorers(configs: Sequence[ScorerConfig], key: str = "reward.scorers") -> dict[str, Scorer]:
    """The scorers, by the name their config gives them, ready to score; raises what `check_scorers`
    raises.
    """
    check_scorers(configs, key)
    return {c.name: _find(c.name, f"{key}[{i}]")(**c.options) for i, c in enumerate(configs)}


def _find(name: str, where: str) -> Any:
    if name in BUILT_IN:
        return BUILT_IN[name]
    if ":" in name:
        return _import(name, where)
    close = difflib.get_close_matches(name, BUILT_IN, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise ValueError(
        f"{where}.name is {name!r}; allowed: {', '.join(BUILT_IN)}, or 'module:Class' of your own{hint}"
    )


def _import(name: str, where: str) -> Any:
    module, _, attribute = name.partition(":")
    try:
        scorer = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"{where}.name is {name!r}, which cannot be imported ({error}); allowed: "
            "'module:Class' on the Python path (installed, or in a folder of PYTHONPATH)"
        ) from error
    if not callable(getattr(scorer, "score", None)):
        raise ValueError(
            f"{where}.name is {name!r}, which has no method score; allowed: a class with score(images, prompts, metadata)"
        )
    return scorer


def _check_options(scorer: type, config: ScorerConfig, where: str) -> None:
    allowed = list(inspect.signature(scorer).parameters)
    for option in config.options:
        if option not in allowed:
            close = difflib.get_close_matches(option, allowed, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ValueError(
                f"{where}.options: {config.name} has no option {option!r}; allowed: "
                f"{', '.join(allowed) or 'none'}{hint}"
            )
