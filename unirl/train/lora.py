# SPDX-License-Identifier: Apache-2.0
"""The adapter: peft's LoRA on the model's public module names, and its plain peft folder."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import peft
import torch
from peft.tuners.lora import LoraLayer
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from unirl.config import LoraConfig, parse

ADAPTER_NAME = "default"
PUBLIC_PREFIX = "base_model.model."
"""What peft puts before a module's name in an adapter file."""

CONFIG_FILE = "adapter_config.json"
TENSOR_FILE = "adapter_model.safetensors"


def inject(model: torch.nn.Module, config: LoraConfig, *, seed: int) -> None:
    """Puts the adapter into `model` and leaves nothing else trainable.

    A is drawn from `seed` alone (the process's random state is neither used nor moved), B is 0, so the model
    computes what it did. Both are float32 (float64 for float64 weights): steps of 1e-4 of a weight vanish in
    bfloat16.

    Raises:
        ValueError: the model has an adapter, `targets` match no module, or a setting is out of range.
    """
    if config.dropout != 0:
        raise ValueError(
            f"model.lora.dropout is {config.dropout}; allowed: 0 (a replay has to compute what the rollout "
            "did, so nothing may be dropped)"
        )
    if config.rank < 1:
        raise ValueError(f"model.lora.rank is {config.rank}; allowed: 1 or more")
    if lora_layers(model):
        raise ValueError("the model has an adapter already; inject one once")
    check_targets(model, config.targets)
    settings = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=0.0,
        target_modules=list(config.targets),
        bias="none",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(settings, model, adapter_name=ADAPTER_NAME)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for layer in lora_layers(model).values():
        for factor in (layer.lora_A[ADAPTER_NAME], layer.lora_B[ADAPTER_NAME]):
            if factor.weight.dtype is not torch.float64:
                factor.weight.data = factor.weight.data.float()
            factor.weight.requires_grad_(True)


def check_targets(model: torch.nn.Module, targets: tuple[str, ...]) -> None:
    """Raises `ValueError` when one of `targets` matches no linear layer of `model`, or there is none."""
    names = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    lost = [t for t in targets if not any(n == t or n.endswith(f".{t}") for n in names)]
    if lost or not targets:
        endings = sorted({".".join(part for part in n.split(".")[-2:] if not part.isdigit()) for n in names})
        raise ValueError(
            f"model.lora.targets {lost or list(targets)} match no linear layer of the model; allowed: "
            f"endings of {endings}"
        )


def lora_layers(model: torch.nn.Module) -> dict[str, LoraLayer]:
    """Public module name -> peft layer, in the model's order."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


def adapter_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The adapter's live parameters under peft's public names (`base_model.model.<module>.lora_A.weight`)."""
    return {
        f"{PUBLIC_PREFIX}{name}.{side}.weight": getattr(layer, side)[ADAPTER_NAME].weight
        for name, layer in lora_layers(model).items()
        for side in ("lora_A", "lora_B")
    }


def adapter_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the adapter's tensors on the CPU, under peft's public names."""
    return {
        name: p.detach().to("cpu", copy=True).contiguous() for name, p in adapter_parameters(model).items()
    }


@contextlib.contextmanager
def adapter_disabled(model: torch.nn.Module) -> Iterator[None]:
    """The base model: the adapter's branch is not computed, so the outputs are the base's, bit for bit."""
    layers = list(lora_layers(model).values())
    if not layers:
        raise ValueError("the model has no adapter that could be disabled")
    trainable = [p for p in adapter_parameters(model).values() if p.requires_grad]
    before = [layer.disable_adapters for layer in layers]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer, was_disabled in zip(layers, before, strict=True):
            layer.enable_adapters(not was_disabled)
        for parameter in trainable:  # peft switches gradients off with the adapter
            parameter.requires_grad_(True)


def merged_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """`W + (alpha / r) B A` of every adapted layer, under the layer's public weight name, in the dtype of W.

    The sum is taken in float32 (float64 for float64 weights) and rounded once.
    """
    merged, factors = {}, adapter_parameters(model)
    for name, layer in lora_layers(model).items():
        base = cast(torch.nn.Linear, layer.get_base_layer()).weight.detach()
        wide = torch.float64 if base.dtype is torch.float64 else torch.float32
        a, b = (factors[f"{PUBLIC_PREFIX}{name}.{side}.weight"].detach() for side in ("lora_A", "lora_B"))
        delta = layer.scaling[ADAPTER_NAME] * (b.to(wide) @ a.to(wide))
        merged[f"{name}.weight"] = (base.to(wide) + delta).to(base.dtype)
    return merged


def export(
    model: torch.nn.Module,
    folder: str | os.PathLike[str],
    *,
    values: Mapping[str, torch.Tensor] | None = None,
) -> Path:
    """Writes the adapter as plain peft does: `adapter_config.json` and `adapter_model.safetensors`.

    Args:
        values: other tensors than the live ones (the EMA's), under the same names.

    The target modules are written out in full, so that a loader cannot match more layers than were trained.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    layers = lora_layers(model)
    if not layers:
        raise ValueError("the model has no adapter to export; train with model.train: lora")
    live = adapter_parameters(model)
    tensors = {
        n: (p if values is None else values[n]).detach().to("cpu", copy=True).contiguous()
        for n, p in live.items()
    }
    first = next(iter(layers.values()))
    settings: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": None,
        "inference_mode": True,
        "r": first.r[ADAPTER_NAME],
        "lora_alpha": first.lora_alpha[ADAPTER_NAME],
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "target_modules": sorted(layers),
    }
    save_file(tensors, folder / TENSOR_FILE, metadata={"format": "pt"})
    (folder / CONFIG_FILE).write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
    return folder


def load(model: torch.nn.Module, folder: str | os.PathLike[str]) -> None:
    """Reads an exported adapter into `model`, injecting one of the exported rank, alpha and targets if it has
    none.

    Raises:
        ValueError: a file is missing or damaged, or its names or shapes are not the model's.
    """
    folder = Path(folder)
    for name in (CONFIG_FILE, TENSOR_FILE):
        if not (folder / name).is_file():
            raise ValueError(f"{folder} holds no {name}: it is no adapter in peft's format")
    config = _read_config(folder / CONFIG_FILE)
    tensors = _read_tensors(folder / TENSOR_FILE)
    if not lora_layers(model):
        inject(model, config, seed=0)
    for name, layer in lora_layers(model).items():
        own = (layer.r[ADAPTER_NAME], layer.lora_alpha[ADAPTER_NAME])
        if own != (config.rank, config.alpha):
            raise ValueError(
                f"{folder}: rank and alpha {config.rank}, {config.alpha} differ from the model's {own[0]}, {own[1]} "
                f"(layer {name}; keys model.lora.rank, model.lora.alpha)"
            )
    copy_named(tensors, adapter_parameters(model), str(folder))


def _read_config(path: Path) -> LoraConfig:
    try:
        settings = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is damaged: it is not JSON ({error}); restore it") from error
    names = {"r": "rank", "lora_alpha": "alpha", "target_modules": "targets"}
    if not isinstance(settings, dict) or not names.keys() <= settings.keys():
        raise ValueError(f"{path} is no adapter's configuration: it needs {', '.join(names)}")
    return parse(LoraConfig, {ours: settings[theirs] for theirs, ours in names.items()}, str(path))


def _read_tensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged: {error}; restore it, or name a whole checkpoint") from error


def copy_named(
    tensors: Mapping[str, torch.Tensor],
    live: Mapping[str, torch.Tensor],
    source: str,
    *,
    partial: bool = False,
) -> None:
    """Copies tensors into live ones by name, after checking every name and shape, so that a refusal leaves
    all as it was.

    Args:
        source: where they come from, for the error. partial: live names may go without a tensor.
    """
    unmatched = sorted(set(tensors) - set(live))
    missing = [] if partial else sorted(set(live) - set(tensors))
    if unmatched or missing or not tensors:
        raise ValueError(
            f"{source}: {len(set(tensors) & set(live))} of {len(tensors)} names are bound"
            + (f"; not in the model: {_listed(unmatched)}" if unmatched else "")
            + (f"; not given: {_listed(missing)}" if missing else "")
        )
    for name, tensor in tensors.items():
        if tensor.shape != live[name].shape:
            raise ValueError(
                f"{source}: {name} has shape {list(tensor.shape)}; the model's is {list(live[name].shape)}"
            )
    with torch.no_grad():
        for name, tensor in tensors.items():
            live[name].copy_(tensor)


def _listed(names: list[str], most: int = 4) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
