# SPDX-License-Identifier: Apache-2.0
"""AdamW with linear warm-up, gradient clipping and skipped non-finite steps, on one flat gradient buffer."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import torch

from unirl.config import OptimConfig

_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclasses.dataclass(frozen=True)
class StepReport:
    """One optimizer step: the gradient's norm before clipping, the learning rate, and whether it was taken."""

    grad_norm: float
    lr: float
    skipped: bool


class Optimizer:
    """Owns the trained parameters' master copies, their gradients and AdamW's state.

    A master is float32 (float64 for float64 weights): the parameter itself where it is that already, else a
    copy from which the parameter is rounded after each step. Gradients of all masters lie in one flat buffer,
    `exchange`, so that ranks exchange them in one collective; behind them are `num_flags` numbers of the
    caller's that travel with them, and which weights took part. A weight that took part on no rank (the text
    head of a model that makes images) has no gradient, and so no weight decay either.
    """

    def __init__(
        self, parameters: Mapping[str, torch.nn.Parameter], config: OptimConfig, *, num_flags: int = 0
    ) -> None:
        self.config = config
        self.parameters = dict(parameters)
        self.masters: dict[str, torch.nn.Parameter] = {
            name: p if p.dtype in (torch.float32, torch.float64) else torch.nn.Parameter(p.detach().float())
            for name, p in self.parameters.items()
        }
        wide = {m.dtype for m in self.masters.values()}
        if len(wide) != 1:
            raise ValueError(f"trained weights must all be float64 or none; got {sorted(map(str, wide))}")
        first = next(iter(self.masters.values()))
        num_values = sum(m.numel() for m in self.masters.values())
        num_all = num_values + num_flags + len(self.masters)
        self.exchange = torch.zeros(num_all, dtype=first.dtype, device=first.device)
        self.flat_gradient = self.exchange[:num_values]
        self.flags = self.exchange[num_values : num_values + num_flags]
        self._touched = self.exchange[num_values + num_flags :]
        self._slices: dict[str, torch.Tensor] = {}
        start = 0
        for name, master in self.masters.items():
            self._slices[name] = self.flat_gradient[start : start + master.numel()].view_as(master)
            start += master.numel()
        self.adamw = torch.optim.AdamW(
            list(self.masters.values()),
            lr=config.lr,
            betas=(config.betas[0], config.betas[1]),
            eps=config.eps,
            weight_decay=config.weight_decay,
        )
        self.steps_taken = 0
        self.steps_skipped = 0

    def zero_grad(self) -> None:
        self.exchange.zero_()
        for parameter in self.parameters.values():
            parameter.grad = None

    def take_gradients(self) -> None:
        """Adds the parameters' gradients to the flat buffer, in the masters' dtype, and frees them. Call
        after every micro-batch.
        """
        for i, (name, parameter) in enumerate(self.parameters.items()):
            if parameter.grad is not None:
                self._slices[name].add_(parameter.grad)
                self._touched[i] = 1.0
                parameter.grad = None

    def learning_rate(self) -> float:
        """Of the next step: step k = 1, 2, ... of `warmup_steps` has lr * k / warmup_steps."""
        if not self.config.warmup_steps:
            return self.config.lr
        return self.config.lr * min(1.0, (self.steps_taken + 1) / self.config.warmup_steps)

    @torch.no_grad()
    def step(self) -> StepReport:
        """One step with the flat gradient, clipped to `max_grad_norm`. A gradient that is not finite leaves
        everything as it was.

        Every rank holds the same summed gradient, and a NaN or infinity of one survives the sum, so all ranks
        decide alike.
        """
        # In float64: a float32 sum of squares overflows for gradients that are themselves finite.
        norm = float(torch.linalg.vector_norm(self.flat_gradient, dtype=torch.float64))
        lr = self.learning_rate()
        if not math.isfinite(norm):
            self.steps_skipped += 1
            return StepReport(norm, lr, True)
        if norm > self.config.max_grad_norm:
            self.flat_gradient.mul_(self.config.max_grad_norm / norm)
        for (name, master), touched in zip(self.masters.items(), self._touched.tolist(), strict=True):
            master.grad = self._slices[name] if touched else None
        for group in self.adamw.param_groups:
            group["lr"] = lr
        self.adamw.step()
        for name, master in self.masters.items():
            master.grad = None
            if master is not self.parameters[name]:
                self.parameters[name].copy_(master)
        self.steps_taken += 1
        return StepReport(norm, lr, False)

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """AdamW's moments and step counts, and the masters that are copies: `<name>:<what>`, the live
        tensors.
        """
        tensors: dict[str, torch.Tensor] = {}
        for name, master in self.masters.items():
            state = self.adamw.state.get(master, {})
            for what in (*_MOMENTS, "step"):
                if what in state:
                    tensors[f"{name}:{what}"] = state[what]
            if master is not self.parameters[name]:
                tensors[f"{name}:master"] = master.detach()
        return tensors

    def state_counts(self) -> dict[str, int]:
        return {"steps_taken": self.steps_taken, "steps_skipped": self.steps_skipped}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, torch.Tensor], counts: Mapping[str, int]) -> None:
        """Takes up what `state_tensors` and `state_counts` gave."""
        known = {f"{name}:{what}" for name in self.masters for what in (*_MOMENTS, "step", "master")}
        if strange := sorted(set(tensors) - known):
            raise ValueError(
                f"the saved optimizer state is of other weights than those trained here, among them {strange[0]}; "
                "check model.train, model.dtype and model.lora.targets"
            )
        for name, master in self.masters.items():
            state = {}
            for what in (*_MOMENTS, "step"):
                if (value := tensors.get(f"{name}:{what}")) is not None:
                    device = master.device if what in _MOMENTS else value.device
                    state[what] = value.to(device=device, copy=True)
            if state:
                self.adamw.state[master] = state
            if (value := tensors.get(f"{name}:master")) is not None:
                master.copy_(value)
        self.steps_taken, self.steps_skipped = int(counts["steps_taken"]), int(counts["steps_skipped"])
