# SPDX-License-Identifier: Apache-2.0
"""Models: weights, token layout and stage of each."""
