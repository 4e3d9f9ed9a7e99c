# SPDX-License-Identifier: Apache-2.0
"""Rollout engines. Each satisfies `unirl.protocols.Engine`."""
