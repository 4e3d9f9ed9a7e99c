# SPDX-License-Identifier: Apache-2.0
"""The training loops, each readable on one screen."""
