# SPDX-License-Identifier: Apache-2.0
"""Ray: placement of slabs, workers, transport of trajectories, weight pushes."""
