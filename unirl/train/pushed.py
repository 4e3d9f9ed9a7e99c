# SPDX-License-Identifier: Apache-2.0
"""The weights of the last pushes, as the rollout engine got them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from unirl.config import RunConfig


class PushedWeights:
    """Keeps what rows that are still to be trained were generated with.

    Adapters are small: those of the newest version and of the `buffer_max_staleness` before it are kept,
    which are all that a row in the buffer can come from. Of full weights only the newest is kept, in host
    memory, and only where the policy moves on between pushes (`weight_sync_interval` > 1): a resumed run must
    give the engine what it held.
    """

    def __init__(
        self, parameters: Mapping[str, torch.nn.Parameter], config: RunConfig, *, adapter: bool
    ) -> None:
        self._parameters = dict(parameters)
        self._adapter = adapter
        self._older = config.buffer_max_staleness if adapter else 0
        self._keeps = adapter or config.weight_sync_interval > 1
        self._versions: dict[int, tuple[int, dict[str, torch.Tensor]]] = {}

    def __contains__(self, push_version: int) -> bool:
        return push_version in self._versions

    def keep(
        self, push_version: int, policy_step: int, tensors: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        """Keeps the live weights, or `tensors`, as those of `push_version`; a kept version does not
        change.
        """
        if not self._keeps or push_version in self._versions:
            return
        source = self._parameters if tensors is None else tensors
        if set(source) != set(self._parameters):
            raise ValueError(
                f"weights of push {push_version}: {len(source)} tensors were given, {len(self._parameters)} "
                "are trained"
            )
        copies = {}
        for name, parameter in self._parameters.items():
            device = parameter.device if self._adapter else torch.device("cpu")
            copies[name] = source[name].detach().to(device=device, dtype=parameter.dtype, copy=True)
        self._versions[push_version] = (policy_step, copies)
        for version in [v for v in self._versions if v < push_version - self._older]:
            del self._versions[version]

    def weights(self, push_version: int) -> Mapping[str, torch.Tensor]:
        """The tensors of a version. Raises `ValueError` when they are not kept."""
        if push_version not in self._versions:
            raise ValueError(
                f"rows of weight version {push_version} have to be replayed under it, and kept are "
                f"{sorted(self._versions) or 'none'}; full "
                "weights are not kept: set old_logp_source: rollout, or model.train: lora"
            )
        return self._versions[push_version][1]

    def policy_step(self, push_version: int) -> int:
        """Optimizer steps inside the version's weights."""
        return self._versions[push_version][0]

    def state_tensors(self) -> dict[str, torch.Tensor]:
        return {
            f"{version}:{name}": t
            for version, (_, tensors) in self._versions.items()
            for name, t in tensors.items()
        }

    def state_counts(self) -> dict[str, int]:
        return {str(version): policy_step for version, (policy_step, _) in self._versions.items()}

    def load(self, tensors: Mapping[str, torch.Tensor], counts: Mapping[str, int]) -> None:
        """Takes up what `state_tensors` and `state_counts` gave."""
        self._versions.clear()
        for version in sorted(int(v) for v in counts):
            prefix = f"{version}:"
            own = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
            self.keep(version, int(counts[str(version)]), own)
