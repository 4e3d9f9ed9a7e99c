# SPDX-License-Identifier: Apache-2.0
"""Curves, sample grids and `report.html` from the files of a run directory.

Needs nothing of the run itself.
"""

from unirl.report.build import write_report
from unirl.report.run_files import RunFiles, load_run

__all__ = ["RunFiles", "load_run", "write_report"]
