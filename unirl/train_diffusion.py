# SPDX-License-Identifier: Apache-2.0
"""`python -m unirl.train_diffusion --config-name=diffusion/<model>/<recipe> [key=value ...]`: the sync trainers."""

from __future__ import annotations

from unirl.entry import main
from unirl.trainer.diffusion import DiffusionTrainer

if __name__ == "__main__":
    main(DiffusionTrainer)
