# SPDX-License-Identifier: Apache-2.0
"""Weights on their way from a trainer to a rollout engine, with proof that they landed.

A push holds canonical tensors: public name, wire dtype, unfused. Its digest is taken over them before they
leave; the receiver takes it again, from its live parameters and through the inverse mapping, after it has
loaded them. For an adapter the digest also covers, layer by layer, the scaled product B A that the layer will
add.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Literal

import torch

from unirl.ops import layout_digest, tensor_digest
from unirl.protocols import WeightPush
from unirl.train import lora
from unirl.train.trainable import is_adapter, live_tensors, trained_parameters

Kind = Literal["adapter", "merged", "full"]
NUM_PROBES = 2

WIRE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


class WeightMismatch(ValueError):  # noqa: N818 (a state of affairs, not a kind of error)
    """A push did not land as it was sent."""


def build_push(
    model: torch.nn.Module,
    push_version: int,
    policy_step: int,
    wire_dtype: torch.dtype | None = None,
    *,
    kind: Kind | None = None,
    values: Mapping[str, torch.Tensor] | None = None,
) -> WeightPush:
    """The weights that a rollout engine needs, as CPU copies.

    Args:
        push_version: pushes so far, this one included. policy_step: optimizer steps inside the weights.
        wire_dtype: None sends every tensor in the dtype that it is trained in.
        kind: `adapter` sends A and B; `merged` sends `W + (alpha/r) B A` of the adapted layers, for an engine
            that knows no adapters; `full` sends what is trained of a model without an adapter. None:
            `adapter` if the model has one, else `full`.
        values: other trained tensors than the live ones (the EMA's), by the names of `trained_parameters`.
    """
    kind = kind or ("adapter" if is_adapter(model) else "full")
    if kind not in ("adapter", "merged", "full"):
        raise ValueError(f"kind of push is {kind!r}; allowed: adapter, merged, full")
    if (kind == "full") == is_adapter(model):
        raise ValueError(
            f"a push of kind {kind!r} was asked of a model {'with' if is_adapter(model) else 'without'} an "
            "adapter"
        )
    if values is not None and kind == "merged":
        raise ValueError(
            "values cannot be given to a merged push; swap them into the model first "
            "(unirl.train.trainable.swapped)"
        )
    source = lora.merged_weights(model) if kind == "merged" else (values or trained_parameters(model))
    # Digested where they are: a whole model is read at the device's speed, not the host's.
    canonical = {n: t.detach().to(dtype=wire_dtype or t.dtype).contiguous() for n, t in source.items()}
    adapter = None
    if kind == "adapter":
        layers = lora.lora_layers(model)
        adapter = {
            "scaling": {name: float(layer.scaling[lora.ADAPTER_NAME]) for name, layer in layers.items()},
            "rank": next(iter(layers.values())).r[lora.ADAPTER_NAME],
            "alpha": next(iter(layers.values())).lora_alpha[lora.ADAPTER_NAME],
        }
    digest = digest_of(canonical, adapter["scaling"] if adapter else None)
    tensors = {name: tensor.to("cpu", copy=True) for name, tensor in canonical.items()}
    return WeightPush(push_version, policy_step, kind, tensors, digest, adapter)


def apply_push(model: torch.nn.Module, push: WeightPush) -> tuple[int, int]:
    """Loads a push and proves it: the digest recomputed from the live parameters. The same push twice is the
    same as once.

    Raises:
        ValueError: no name is bound, a name or shape does not match; nothing has been changed then.
        WeightMismatch: the live parameters are not what was sent.
    """
    bind_push(model, push)
    return verify_push(model, push)


def bind_push(model: torch.nn.Module, push: WeightPush) -> None:
    """Copies the tensors into the live parameters of their names."""
    lora.copy_named(
        push.tensors,
        _receiving(model, push),
        f"weight push {push.push_version}",
        partial=push.kind != "adapter",
    )


def verify_push(model: torch.nn.Module, push: WeightPush) -> tuple[int, int]:
    """The digest of the live parameters; `WeightMismatch` names the tensors when it is not the
    push's.
    """
    live = _receiving(model, push)
    landed = {
        name: live[name].detach().to(dtype=tensor.dtype).contiguous()
        for name, tensor in push.tensors.items()
        if name in live
    }
    scaling = None
    if push.kind == "adapter":
        scaling = {
            name: float(layer.scaling[lora.ADAPTER_NAME]) for name, layer in lora.lora_layers(model).items()
        }
    digest = digest_of(landed, scaling)
    if digest != push.digest:
        raise WeightMismatch(
            f"weight push {push.push_version} did not land: {_diagnosis(landed, scaling, push)}"
        )
    return digest


def digest_of(
    tensors: Mapping[str, torch.Tensor], scaling: Mapping[str, float] | None = None
) -> tuple[int, int]:
    """128 bits over the tensors by sorted name: names, dtypes, shapes and every bit of the values count.

    Args:
        scaling: module name -> alpha / r, for an adapter: then `scaling * B (A x)` of every layer counts as
            well, for fixed probes x of +-1, summed in an order that is the same on every device. A factor in
            the wrong layer, or another scale, shows.
    """
    entries = dict(tensors)
    for name, scale in (scaling or {}).items():
        a, b = (tensors.get(f"{lora.PUBLIC_PREFIX}{name}.{side}.weight") for side in ("lora_A", "lora_B"))
        if a is not None and b is not None:
            entries[f"{name}.product"] = _product_probe(a, b, scale)
    names = sorted(entries)
    rows = tensor_digest([entries[name] for name in names]).to("cpu")
    keys = torch.tensor([_name_key(name) for name in names], dtype=torch.int64).reshape(-1, 2)
    words = torch.cat([keys, rows], dim=1).reshape(1, -1)
    first, second = layout_digest(words)[0].tolist()
    return first, second


def _receiving(model: torch.nn.Module, push: WeightPush) -> Mapping[str, torch.Tensor]:
    if push.kind == "adapter":
        if not is_adapter(model):
            raise ValueError(
                f"weight push {push.push_version} holds an adapter, and the receiving model has none; inject "
                "it first"
            )
        return lora.adapter_parameters(model)
    return live_tensors(model)


def _diagnosis(
    landed: Mapping[str, torch.Tensor], scaling: Mapping[str, float] | None, push: WeightPush
) -> str:
    lost = sorted(set(push.tensors) - set(landed))
    wrong = [
        n
        for n, t in landed.items()
        if not torch.equal(
            t.cpu().reshape(-1).view(torch.uint8), push.tensors[n].reshape(-1).view(torch.uint8)
        )
    ]
    sent_scaling: Mapping[str, float] | None = (push.adapter or {}).get("scaling")
    found = []
    if lost:
        found.append(f"{len(lost)} tensors have no live parameter: {', '.join(lost[:4])}")
    if wrong:
        found.append(
            f"{len(wrong)} of {len(push.tensors)} live parameters differ from what was sent: "
            f"{', '.join(wrong[:4])}"
        )
    if scaling != sent_scaling:
        other = [
            n
            for n in {**(scaling or {}), **(sent_scaling or {})}
            if (scaling or {}).get(n) != (sent_scaling or {}).get(n)
        ]
        found.append(
            f"the adapter's scale differs in {len(other)} layers, among them {other[0]}: sent "
            f"{(sent_scaling or {}).get(other[0])}, "
            f"live {(scaling or {}).get(other[0])} (keys model.lora.rank, model.lora.alpha)"
        )
    if not found:
        found.append(
            "the tensors that arrived are not those whose digest was sent (one is missing, or was changed on "
            "the way)"
        )
    return "; ".join(found)


def _name_key(name: str) -> tuple[int, int]:
    digest = hashlib.blake2b(name.encode(), digest_size=16).digest()
    return int.from_bytes(digest[:8], "little", signed=True), int.from_bytes(
        digest[8:], "little", signed=True
    )


def _product_probe(a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """float32 `[NUM_PROBES, out]`: scale * B (A x), with A `[r, in]`, B `[out, r]`."""
    index = torch.arange(NUM_PROBES * a.shape[1], dtype=torch.int64, device=a.device).reshape(NUM_PROBES, -1)
    # Bits of a multiplicative hash: the same signs everywhere, and no random state.
    signs = 1.0 - 2.0 * (((index + 1) * 2654435761 >> 15) & 1).double()
    hidden = _halving_sum(a.double()[None] * signs[:, None])
    return (scale * _halving_sum(b.double()[None] * hidden[:, None])).float()


def _halving_sum(values: torch.Tensor) -> torch.Tensor:
    """The sum over the last axis in a fixed order, by adding halves: elementwise, so that every device gives
    the same bits.
    """
    width = 1 << max(values.shape[-1] - 1, 0).bit_length()
    values = torch.nn.functional.pad(values, (0, width - values.shape[-1]))
    while values.shape[-1] > 1:
        half = values.shape[-1] // 2
        values = values[..., :half] + values[..., half:]
    return values[..., 0]


def wire_dtype(name: str | None) -> torch.dtype | None:
    """The dtype called `name`; None stays None."""
    if name is None:
        return None
    if name not in WIRE_DTYPES:
        raise ValueError(f"wire dtype is {name!r}; allowed: {', '.join(WIRE_DTYPES)}")
    return WIRE_DTYPES[name]


def summary(push: WeightPush) -> dict[str, Any]:
    """What a log line wants to know of a push."""
    num_bytes = sum(t.numel() * t.element_size() for t in push.tensors.values())
    return {
        "version": push.push_version,
        "policy_step": push.policy_step,
        "tensors": len(push.tensors),
        "bytes": num_bytes,
    }
