# SPDX-License-Identifier: Apache-2.0
"""Rollout: the engines that generate, and the runtime that keeps them busy beside training."""
