# SPDX-License-Identifier: Apache-2.0
"""Lets the siblings of a prompt share it inside a model that somebody else wrote: ``unirl.accelerate(model)``.

A cross-attention reads its queries token by token, so the n siblings of a prompt may stand in one row, one
after the other: ``[G n, L, C]`` becomes ``[G, n L, C]``, and the prompt is projected to keys and values once
instead of n times. The model's own attention processor does the rest, so its projections (adapters included),
norms, masks and kernels stay what they were. ``sibling_prefix_attention`` is not what runs here: it is for
queries that have keys of their own beside the prefix, which a cross-attention has not.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from unirl.accelerate_inputs import MAKE_INPUTS
from unirl.ops import available_attention_backends

_JOINT = {
    "AuraFlowTransformer2DModel",
    "ChromaTransformer2DModel",
    "Flux2Transformer2DModel",
    "FluxTransformer2DModel",
    "QwenImageTransformer2DModel",
    "SD3Transformer2DModel",
}
# Processors of diffusers that treat every query token by itself.
_TOKENWISE = ("AttnProcessor", "AttnProcessor2_0", "FusedAttnProcessor2_0", "WanAttnProcessor")

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest error that ``check=True`` accepts, over the largest output, by the output's dtype."""


@dataclass(frozen=True)
class Comparison:
    """Outputs of one call before and after.

    Attributes:
        max_abs: largest difference of two elements.
        max_rel: ``max_abs`` over the largest output before.
        tolerance: largest ``max_rel`` accepted.
        dtype: of the outputs.
        siblings: rows a prompt in the call.
    """

    max_abs: float
    max_rel: float
    tolerance: float
    dtype: torch.dtype
    siblings: int

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"max abs error {self.max_abs:.2e}, relative {self.max_rel:.2e} "
            f"(allowed {self.tolerance:.0e}, {dtype}, {self.siblings} siblings)"
        )


class SharedPrompt:
    """A cross-attention processor around diffusers' own: one row of prompt a group of siblings.

    Args:
        processor: the one that was there; it is called with the folded rows.
        siblings: rows of a group, contiguous in the batch; with 1 the call passes through unchanged.
    """

    def __init__(self, processor: Any, siblings: int = 1) -> None:
        self.processor = processor
        self.siblings = siblings

    def __call__(
        self,
        attn: nn.Module,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Mix ``[N, L, C]`` with the prompts ``[N, P, C']``, of which the rows of a group are equal."""
        siblings = self.siblings
        if siblings == 1 or encoder_hidden_states is None:
            return self.processor(attn, hidden_states, encoder_hidden_states, attention_mask, *args, **kwargs)
        if any(extra is not None for extra in (*args, *kwargs.values())):
            raise ValueError(
                "a cross-attention with siblings takes hidden states, encoder hidden states and a mask; "
                "further arguments (a rotary embedding?) cannot be shared: run this call with siblings 1"
            )
        rows = hidden_states.shape[0]
        if hidden_states.ndim != 3 or encoder_hidden_states.shape[0] != rows or rows % siblings:
            raise ValueError(
                f"hidden states {tuple(hidden_states.shape)} and encoder hidden states "
                f"{tuple(encoder_hidden_states.shape)} with siblings {siblings}; expected [N, L, C] and "
                "[N, P, C'] with N a multiple of siblings"
            )
        _require_equal_siblings("encoder_hidden_states", encoder_hidden_states, siblings)
        mask = self._shared_mask(attention_mask, rows)
        folded = hidden_states.reshape(rows // siblings, -1, hidden_states.shape[2])
        mixed = self.processor(attn, folded, encoder_hidden_states[::siblings].contiguous(), mask)
        return mixed.reshape(rows, -1, mixed.shape[2])

    def _shared_mask(self, mask: Tensor | None, rows: int) -> Tensor | None:
        if mask is None:
            return None
        if mask.ndim != 3 or mask.shape[:2] != (rows, 1):
            raise ValueError(
                f"the prompt's mask has shape {tuple(mask.shape)}; siblings can share one over keys only, "
                f"[N, 1, P] with N = {rows}: run this call with siblings 1"
            )
        _require_equal_siblings("encoder_attention_mask", mask, self.siblings)
        return mask[:: self.siblings]


class SharedPromptDispatched(SharedPrompt):
    """The same around a processor that picks its kernel by diffusers' attention dispatcher (Wan)."""

    @property
    def _attention_backend(self) -> Any:
        return self.processor._attention_backend

    @_attention_backend.setter
    def _attention_backend(self, backend: Any) -> None:
        self.processor._attention_backend = backend

    @property
    def _parallel_config(self) -> Any:
        return self.processor._parallel_config

    @_parallel_config.setter
    def _parallel_config(self, config: Any) -> None:
        self.processor._parallel_config = config

    def _shared_mask(self, mask: Tensor | None, rows: int) -> None:
        if mask is not None:
            raise ValueError("a mask in this cross-attention is not supported: run this call with siblings 1")


@dataclass
class Acceleration:
    """What :func:`accelerate` did to a model.

    Attributes:
        model: the model, changed in place.
        family: class name of the transformer in it.
        replaced: names of the attention layers whose processor this call replaced.
        already: names of those that had been replaced before.
        comparison: outcome of ``check=True``, if it was asked for and there was something to compare.
        notes: further lines of the report.
    """

    model: nn.Module
    family: str
    replaced: tuple[str, ...]
    already: tuple[str, ...]
    notes: tuple[str, ...]
    _layers: dict[str, Any]
    comparison: Comparison | None = None

    def siblings(self, count: int) -> AbstractContextManager[None]:
        """Inside, every ``count`` consecutive rows of a batch are siblings: equal prompt, equal mask.

        A gradient-checkpointed forward has its backward inside as well, as that runs the layers again.

        Raises:
            ValueError: ``count`` below 1; a model whose processors are not there (any more).
        """
        _check_siblings(count)
        return _siblings_set(self._processors(), count)

    def undo(self) -> None:
        """Put back the processors that the model had. A second call changes nothing."""
        for layer in self._layers.values():
            if isinstance(layer.processor, SharedPrompt):
                layer.set_processor(layer.processor.processor)

    def _processors(self) -> list[SharedPrompt]:
        if not self._layers:
            raise ValueError(f"nothing was replaced in {self.family}: it has no siblings to set")
        for name, layer in self._layers.items():
            if not isinstance(layer.processor, SharedPrompt):
                raise ValueError(
                    f"{name} has a {type(layer.processor).__name__} again, by undo() or by another replacement "
                    "(fusing projections is one); call unirl.accelerate(model) again"
                )
        return [layer.processor for layer in self._layers.values()]

    def __str__(self) -> str:
        lines = [f"unirl.accelerate: {self.family}"]
        for what, names in (("replaced", self.replaced), ("replaced before", self.already)):
            if names:
                lines.append(f"{what}: {_listed(names)}")
        lines.extend(self.notes)
        if self.comparison is not None:
            lines.append(f"check: {self.comparison}")
        return "\n  ".join(lines)


def accelerate(
    model: nn.Module,
    *,
    siblings: int | None = None,
    check: bool = False,
    inputs: Mapping[str, Any] | None = None,
    quiet: bool = False,
) -> Acceleration:
    """Let siblings share their prompt in ``model``, in place; the same call again changes nothing.

    Diffusers' PixArt and Wan transformers get new processors in their cross-attention layers. BAGEL of this
    package runs on :mod:`unirl.ops` as it is. Models with joint attention have nothing that siblings share.

    Args:
        model: a transformer, alone or inside a wrapper (peft, ``torch.compile``, data parallel).
        siblings: consecutive rows of every batch that share prompt and mask; by default what was set before,
            else 1, with which the model computes exactly what it did. :meth:`Acceleration.siblings` sets it
            for a block of code. Siblings that differ are an error on the CPU; on other devices nobody looks.
        check: run ``model`` before and after, without dropout or gradients, and compare.
        inputs: the call's keyword arguments for ``check``; made up by default.
        quiet: do not print the report.

    Returns:
        The report, which can undo it all.

    Raises:
        ValueError: a model that is not supported or has no shared prefix, or arguments that do not fit; the
            model is as it was.
        RuntimeError: ``check`` found an error beyond :data:`TOLERANCES`; every processor is put back.
    """
    if siblings is not None:
        _check_siblings(siblings)
    if inputs is not None and not check:
        raise ValueError("inputs are what check=True runs; pass check=True or leave inputs out")
    family, target = _find(model)
    if family == "Bagel":
        report = _bagel_report(model, target, siblings, check)
    else:
        report = _share_prompts(model, family, target, siblings, inputs, check)
    if not quiet:
        print(report)
    return report


@contextmanager
def _siblings_set(processors: Sequence[SharedPrompt], count: int) -> Iterator[None]:
    before = [processor.siblings for processor in processors]
    try:
        for processor in processors:
            processor.siblings = count
        yield
    finally:
        for processor, previous in zip(processors, before, strict=True):
            processor.siblings = previous


def _check_siblings(count: int) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"siblings is {count!r}; allowed: a whole number of rows, at least 1")


def _require_equal_siblings(name: str, rows: Tensor, siblings: int) -> None:
    """Raise unless the rows of every group are equal, up to the rounding of a projection before this layer.

    Only where reading a value waits for nobody.
    """
    if rows.device.type != "cpu" or torch.compiler.is_compiling():
        return
    values = rows.detach().float()
    grouped = values.unflatten(0, (-1, siblings))
    rounding = 4 * torch.finfo(rows.dtype).eps if rows.is_floating_point() else 0.0
    if (grouped - grouped[:, :1]).abs().max() > rounding * values.abs().max():
        raise ValueError(
            f"{name} differs between rows that siblings={siblings} declares to share it; every {siblings} "
            "consecutive rows need the same prompt and mask (repeat_interleave, not repeat)"
        )


def _find(model: nn.Module) -> tuple[str, nn.Module]:
    """Return the family's name and the transformer in ``model``."""
    supported = ", ".join((*MAKE_INPUTS, "Bagel"))
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"model is a {type(model).__name__}, not a torch.nn.Module; pass the transformer itself "
            f"(of a pipeline: its .transformer). Supported: {supported}"
        )
    found: list[tuple[str, nn.Module]] = []
    for module in model.modules():
        name = _family(module)
        if name in _JOINT:
            raise ValueError(
                f"{name} has no prefix that siblings could share: in its joint attention the text attends to "
                "the image in every block, so the keys and values of a prompt differ from sibling to sibling "
                f"and from step to step. Nothing was changed. Supported: {supported}"
            )
        if name is not None:
            found.append((name, module))
    if len(found) != 1:
        what = ", ".join(name for name, _ in found) if found else "no supported transformer"
        raise ValueError(f"{type(model).__name__} holds {what}; pass one of: {supported}")
    return found[0]


def _family(module: nn.Module) -> str | None:
    # By name, so that a library which the model does not come from is never imported.
    for cls in type(module).__mro__:
        package = cls.__module__
        if package.startswith("diffusers.") and (cls.__name__ in MAKE_INPUTS or cls.__name__ in _JOINT):
            return cls.__name__
        if package.startswith("unirl.models.bagel.") and cls.__name__ == "Bagel":
            return "Bagel"
    return None


def _bagel_report(model: nn.Module, bagel: Any, siblings: int | None, check: bool) -> Acceleration:
    if siblings is not None:
        raise ValueError(f"siblings is {siblings}, but Bagel takes it in each call: velocity(..., siblings=)")
    layers = len(bagel.language_model.model.layers)
    kernels = ", ".join(available_attention_backends(bagel.device))
    notes = [
        "replaced: nothing, the model is written on unirl.ops",
        f"already there: sibling_prefix_attention in the denoising of {layers} layers ({bagel.device.type}: "
        f"first of {kernels} that takes the call), guided_velocity in its guidance",
        "left: the pass over the prompt, once a rollout and causal, on torch's attention",
    ]
    if check:
        notes.append("check: nothing was replaced, so there is nothing to compare")
    return Acceleration(model, "Bagel", (), (), tuple(notes), {})


def _share_prompts(
    model: nn.Module,
    family: str,
    target: Any,
    siblings: int | None,
    inputs: Mapping[str, Any] | None,
    check: bool,
) -> Acceleration:
    layers = {
        name: module
        for name, module in target.named_modules()
        if name.split(".")[-1] == "attn2" and hasattr(module, "set_processor")
    }
    if not layers:
        raise ValueError(f"this {family} has no cross-attention: nothing that siblings could share")
    already = {name for name, layer in layers.items() if isinstance(layer.processor, SharedPrompt)}
    for name in layers.keys() - already:
        _check_layer(name, layers[name])
    if siblings is None:
        siblings = max((layers[name].processor.siblings for name in already), default=1)
    if inputs is not None and siblings == 1:
        raise ValueError(
            "check with inputs needs siblings, the rows of inputs that share a prompt, at least 2; got 1"
        )
    note = (
        f"siblings: {siblings} consecutive rows share a prompt"
        if siblings > 1
        else "siblings: 1, nothing is shared until accelerate(siblings=n) or report.siblings(n) says so"
    )
    replaced = tuple(name for name in layers if name not in already)
    report = Acceleration(
        model,
        family,
        replaced,
        tuple(name for name in layers if name in already),
        (note, "left: everything else, in which a prompt has no part of its own"),
        layers,
    )
    if check:
        made = siblings if siblings > 1 else 2
        call = dict(inputs) if inputs is not None else MAKE_INPUTS[family](target, made)
        report.undo()
        before = _run(model, call)
        _install(layers, made)
        try:
            report.comparison = _compare(before, _run(model, call), made)
        except BaseException:
            report.undo()
            raise
    _install(layers, siblings)
    return report


def _check_layer(name: str, layer: Any) -> None:
    processor = type(layer.processor)
    if processor.__name__ not in _TOKENWISE or not processor.__module__.startswith("diffusers."):
        raise ValueError(
            f"{name} has the processor {processor.__name__}, which may mix the tokens of a row; supported: "
            f"diffusers' {', '.join(_TOKENWISE)}. Call accelerate before such a processor is set"
        )
    for norm in ("group_norm", "spatial_norm"):
        if getattr(layer, norm, None) is not None:
            raise ValueError(
                f"{name} has a {norm}, which mixes the tokens of a row: siblings cannot share one"
            )


def _install(layers: Mapping[str, Any], siblings: int) -> None:
    for layer in layers.values():
        if not isinstance(layer.processor, SharedPrompt):
            dispatched = hasattr(layer.processor, "_attention_backend")
            layer.set_processor((SharedPromptDispatched if dispatched else SharedPrompt)(layer.processor))
        layer.processor.siblings = siblings


def _run(model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            output = model(**inputs)
    finally:
        for module in training:
            module.training = True
    return output if isinstance(output, Tensor) else output[0]


def _compare(before: Tensor, after: Tensor, siblings: int) -> Comparison:
    largest = float(before.abs().max())
    max_abs = float((after.double() - before.double()).abs().max())
    if not 0.0 < largest < float("inf"):
        raise RuntimeError(
            f"check: the largest output before was {largest}, so a comparison shows nothing; "
            "every processor was put back. Pass inputs= for which the model has finite, nonzero outputs"
        )
    result = Comparison(max_abs, max_abs / largest, TOLERANCES[before.dtype], before.dtype, siblings)
    if not result.max_rel <= result.tolerance:
        raise RuntimeError(f"check: {result}; every processor was put back")
    return result


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names) if len(names) < 4 else f"{names[0]}, {names[1]} ... {names[-1]}"
    return f"{len(names)} cross-attention processors ({shown})"


class _CallableModule(ModuleType):
    """``unirl.accelerate`` names this module; called, it is the function of the same name."""

    def __call__(self, *args: Any, **kwargs: Any) -> Acceleration:
        return accelerate(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule
