# SPDX-License-Identifier: Apache-2.0
"""Scripts that import Triton, each in a process of its own: with the Triton that is installed, and with one in a folder.

``UNIRL_TRITON_3_6`` names a folder made by ``pip install --no-deps --target FOLDER triton==3.6.0 "numpy<2.4"``: the
Triton of the oldest torch that the package takes, and a NumPy that its interpreter works with.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = {"3.6.0": "UNIRL_TRITON_3_6"}
VERSIONS = ["installed", *(pytest.param(version, marks=pytest.mark.slow) for version in FOLDERS)]


def run_script(script: str, *arguments: str, version: str = "installed", **environment: str) -> str:
    """Return the last line that ``script`` of this folder prints; skip where the Triton is not to be had."""
    paths = [str(ROOT)]
    if version != "installed":
        variable = FOLDERS[version]
        folder = os.environ.get(variable)
        if not folder:
            pytest.skip(f"{variable} names no folder with Triton {version}; how to make one: {__file__}")
        found = [path.name for path in Path(folder).glob("triton-*.dist-info")]
        assert found == [f"triton-{version}.dist-info"], f"{variable}={folder} holds {found}"
        paths.insert(0, folder)
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / script), *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environment},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.splitlines()[-1]


def used_version(version: str) -> str:
    """The version that a script has to have imported."""
    import triton

    return triton.__version__ if version == "installed" else version
