# SPDX-License-Identifier: Apache-2.0
"""`python -m unirl.train_async_diffusion --config-name=diffusion/<model>/<recipe> [key=value ...]`: the async trainer."""

from __future__ import annotations

from unirl.entry import main
from unirl.trainer.async_diffusion import AsyncDiffusionTrainer

if __name__ == "__main__":
    main(AsyncDiffusionTrainer)
