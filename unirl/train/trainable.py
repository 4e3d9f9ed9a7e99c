# SPDX-License-Identifier: Apache-2.0
"""Which tensors are trained, and under which public names."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch

from unirl.config import ModelConfig, RunConfig
from unirl.models.bagel.layers import make_batch_invariant
from unirl.train import lora


def prepare(model: torch.nn.Module, config: ModelConfig, *, seed: int) -> None:
    """Makes `model` trainable as `config.train` says: an injected adapter, or every weight that is not fixed
    by design.

    Trainer and rollout engine both call it, with the same seed, so that a push finds the same names on both
    sides. The model is put into evaluation mode for good: a replay has to compute what the rollout did.
    """
    if config.train == "lora":
        lora.inject(model, config.lora, seed=seed)
    if getattr(getattr(model, "config", None), "batch_invariant", False):
        make_batch_invariant(model)  # the adapter's layers are new
    if config.gradient_checkpointing:
        model.gradient_checkpointing = True  # type: ignore[assignment]
    model.eval()


def is_bitwise(config: RunConfig, model: torch.nn.Module) -> bool:
    """Whether a replay of `model` gives a row's bits whatever its batch: as `parity.bitwise` says, and where it says nothing, when
    everything that it needs is there.
    """
    if config.parity.bitwise is not None:
        return config.parity.bitwise
    if not getattr(getattr(model, "config", None), "batch_invariant", False):
        return False
    weight = next(model.parameters())
    return weight.is_cuda or (weight.dtype == torch.float32 and config.threads_per_worker == 1)


def is_adapter(model: torch.nn.Module) -> bool:
    """Whether `model` is trained through an adapter."""
    return bool(lora.lora_layers(model))


def live_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The model's own parameters (no adapter) under their public names.

    A model that stores weights in another form than the public one (fused, say) says so by a method
    `public_tensors()`, which gives views of its parameters by public name: reading and writing them is then
    the mapping and its inverse.
    """
    own = getattr(model, "public_tensors", None)
    if own is not None:
        return dict(own())
    return {
        name.replace(".base_layer.", "."): parameter
        for name, parameter in model.named_parameters()
        if ".lora_A." not in name and ".lora_B." not in name
    }


def trained_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """What the optimizer moves, by public name: the adapter's factors (peft's names), or the weights that ask
    for gradients.
    """
    if is_adapter(model):
        return lora.adapter_parameters(model)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trained:
        raise ValueError(
            "nothing in the model asks for gradients, so there is nothing to train; check model.train"
        )
    return trained


@contextlib.contextmanager
def swapped(
    parameters: Mapping[str, torch.nn.Parameter], values: Mapping[str, torch.Tensor]
) -> Iterator[None]:
    """Lets the parameters hold `values` for a while. What they held comes back untouched: the storage is
    exchanged, not copied over.
    """
    missing = sorted(set(parameters) - set(values))
    if missing:
        raise ValueError(
            f"weights to swap in lack {len(missing)} of {len(parameters)} tensors, among them {missing[0]}"
        )
    before = {name: parameter.data for name, parameter in parameters.items()}
    try:
        for name, parameter in parameters.items():
            parameter.data = values[name].to(device=parameter.device, dtype=parameter.dtype)
        yield
    finally:
        for name, parameter in parameters.items():
            parameter.data = before[name]
