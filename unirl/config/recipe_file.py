# SPDX-License-Identifier: Apache-2.0
"""The recipe that a run saved, read back."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml


def read_recipe_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The mapping in a run's `config.yaml`, not checked any further.

    Raises `ValueError`, naming the file, when it cannot be read, is not UTF-8, is not YAML, or holds something else than a mapping.
    """
    try:
        recipe = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise _unusable(path, f"it cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise _unusable(path, f"it is not UTF-8 text ({error.reason} at byte {error.start})") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise _unusable(path, f"it is not YAML ({' '.join(str(error).split())})") from error
    if recipe is None:
        raise _unusable(path, "it is empty")
    if not isinstance(recipe, dict):
        raise _unusable(path, f"it holds a {type(recipe).__name__}; allowed: a mapping of keys")
    return recipe


def _unusable(path: str | os.PathLike[str], why: str) -> ValueError:
    return ValueError(f"{path} is not the recipe that a run saved: {why}; restore the file")
