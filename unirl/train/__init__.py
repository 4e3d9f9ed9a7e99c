# SPDX-License-Identifier: Apache-2.0
"""Training: replay and update, the adapter, pushes with proof, checkpoints."""
