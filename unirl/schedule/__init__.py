# SPDX-License-Identifier: Apache-2.0
"""Long-tail scheduling: which rank generates which rows, so that none waits for the largest canvas."""
