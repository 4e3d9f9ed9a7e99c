# SPDX-License-Identifier: Apache-2.0
"""Sigma schedules and trained-step sets. A step itself is `unirl.ops.flow_step`."""

from unirl.sde.schedule import dynamic_sigmas, linear_mu, shifted_sigmas
from unirl.sde.steps import StepSet

__all__ = ["StepSet", "dynamic_sigmas", "linear_mu", "shifted_sigmas"]
