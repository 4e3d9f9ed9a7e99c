# SPDX-License-Identifier: Apache-2.0
"""Small weights that ship with the package: the digits base and the digits classifier."""

from __future__ import annotations

from pathlib import Path


def asset(name: str) -> Path:
    """Path of a shipped file or folder; it need not exist (a stripped installation may lack it)."""
    return Path(__file__).parent / name
