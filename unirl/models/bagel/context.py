# SPDX-License-Identifier: Apache-2.0
"""Prefixes of the denoised block: keys and values of text and source images, computed once a group.

The siblings of a group read one prefix. Groups with the same prompt and source share its computation, and the
text-CFG context of an image-to-image request is the front of its generation context, so it costs nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from unirl.models.bagel.layout import CONTEXT_NAMES, Block, Layout
from unirl.models.bagel.model import Bagel
from unirl.models.bagel.transformer import LayerCache, Tokens
from unirl.ops import tensor_digest


@dataclass(frozen=True, eq=False)
class SourceImage:
    """A source image as the model reads it.

    Attributes:
        vae_latent: ``[z, h, w]``, scaled as the denoised latents are.
        vit_pixels: ``[c, H, W]`` in [-1, 1].
        key: equal for equal images; groups with equal keys share their prefix.
        vae_pixels: ``[c, H, W]`` in [-1, 1], what ``vae_latent`` was encoded from, where it is known: only
            the fingerprint reads it.
    """

    vae_latent: Tensor
    vit_pixels: Tensor
    key: Hashable
    vae_pixels: Tensor | None = None


@dataclass(frozen=True, eq=False)
class ContextRequest:
    """One group: its layout, and its source image when the layout has one."""

    layout: Layout
    source: SourceImage | None = None


@dataclass(frozen=True, eq=False)
class Context:
    """One guidance branch's prefix of G groups.

    Attributes:
        layers: every layer's rotated keys and values ``[G, Hk, P, D]``, right-padded with zeros to the
            longest.
        lengths: keys and values each group really has.
        prefix_lengths: the same as int32 ``[G]`` on the device, or ``None`` when all equal P.
        rope_offsets: rotary position of the denoised block that follows, int64 ``[G]``.
        fields: for each group, what the transformer was given to make its prefix: name to int64 ``[n]`` on
            the device.
    """

    layers: list[LayerCache]
    lengths: tuple[int, ...]
    prefix_lengths: Tensor | None
    rope_offsets: Tensor
    fields: tuple[dict[str, Tensor], ...]

    @property
    def num_groups(self) -> int:
        """G."""
        return len(self.lengths)


@dataclass(frozen=True, eq=False)
class Contexts:
    """The contexts that were asked for, by name."""

    by_name: dict[str, Context]

    def of(self, name: str) -> Context:
        """The context called ``name``; ``ValueError`` when it was not built."""
        if name not in self.by_name:
            raise ValueError(f"context {name!r} was not built; built: {', '.join(self.by_name)}")
        return self.by_name[name]


@dataclass(eq=False)
class _Prefix:
    """Row ``row`` of a batched prefill, of which the first ``length`` keys and values are real."""

    layers: list[LayerCache]
    row: int
    length: int
    fields: dict[str, Tensor]


def build_contexts(
    model: Bagel,
    requests: Sequence[ContextRequest],
    names: Sequence[str] = CONTEXT_NAMES,
    *,
    pad_text: bool | None = None,
) -> Contexts:
    """Prefill the contexts of G groups.

    Gradients flow wherever the weights ask for them: a text prefix of a model whose understanding expert is
    frozen
    costs no graph, an image-to-image prefix goes through the generation expert and does.

    Args:
        model: the weights.
        requests: one a group.
        names: which of ``gen``, ``cfg_text``, ``cfg_img`` to build.
        pad_text: prefill texts of different lengths in one call. By default only without
            ``config.batch_invariant``, for padding moves last bits; training that needs no exact replay may
            ask for it.

    Raises:
        ValueError: a request whose layout has a source image and that brings none.
    """
    if not requests:
        raise ValueError("build_contexts was given no requests; it needs one a group")
    for number, request in enumerate(requests):
        if request.layout.cfg_text.blocks and request.source is None:
            raise ValueError(
                f"request {number} has a source image in its layout but brings none (source is None)"
            )
    pad_text = not model.config.batch_invariant if pad_text is None else pad_text
    done: dict[Hashable, _Prefix] = {}
    by_name: dict[str, Context] = {}
    shared: dict[tuple[Hashable, ...], Context] = {}
    # The generation context comes first: the text-CFG context is a by-product of it.
    for name in sorted(names, key=CONTEXT_NAMES.index):
        keys = tuple(_key(request.layout.context(name).blocks, request) for request in requests)
        if keys not in shared:
            _prefill_missing(model, requests, name, keys, done, pad_text)
            shared[keys] = _assemble(model, requests, name, [done[key] for key in keys])
        by_name[name] = shared[keys]
    return Contexts(by_name)


def _key(blocks: tuple[Block, ...], request: ContextRequest) -> Hashable:
    has_image = any(block.grid for block in blocks)
    return blocks, request.source.key if has_image else None


def _prefill_missing(
    model: Bagel,
    requests: Sequence[ContextRequest],
    name: str,
    keys: Sequence[Hashable],
    done: dict[Hashable, _Prefix],
    pad_text: bool,
) -> None:
    buckets: dict[Hashable, dict[Hashable, ContextRequest]] = {}
    for key, request in zip(keys, requests, strict=True):
        if key not in done:
            blocks = request.layout.context(name).blocks
            shape = tuple((b.kind, b.grid, None if b.grid or pad_text else b.num_tokens) for b in blocks)
            # A GPU's attention kernel may split its work by the number of requests.
            alone = model.config.batch_invariant and model.device.type == "cuda"
            buckets.setdefault(key if alone else shape, {})[key] = request
    for bucket in buckets.values():
        _prefill(model, list(bucket), list(bucket.values()), name, done)


def _prefill(
    model: Bagel,
    keys: list[Hashable],
    requests: list[ContextRequest],
    name: str,
    done: dict[Hashable, _Prefix],
) -> None:
    """Prefill requests whose blocks are alike but for text lengths; text is last, so padding is harmless."""
    contexts = [request.layout.context(name) for request in requests]
    caches: list[LayerCache] | None = None
    given: list[dict[str, list[Tensor]]] = [{} for _ in requests]
    for number, block in enumerate(contexts[0].blocks):
        blocks = [context.blocks[number] for context in contexts]
        fed = _embed(model, number, blocks, requests)
        caches = model.language_model.model.prefill(
            fed.tokens, fed.positions, caches, causal=block.kind == "text"
        )
        for row, (context, request) in enumerate(zip(contexts, requests, strict=True)):
            num_tokens = blocks[row].num_tokens
            padding = fed.num_tokens - num_tokens
            # The shape of the cache, not the plan, says how many keys there are.
            length = caches[0].key.shape[2] - padding
            real_ids = fed.ids[row, : fed.ids.shape[1] - padding]
            for field, value in (
                ("token_ids", real_ids),
                ("position_ids", fed.positions.expand(fed.num_tokens)[:num_tokens]),
                ("image_shapes", fed.image_shape),
                ("source_pixels", fed.pixel_digests[row]),
            ):
                given[row].setdefault(field, []).append(value)
            fields = {field: torch.cat(values) for field, values in given[row].items()}
            done[_key(context.blocks[: number + 1], request)] = _Prefix(caches, row, length, fields)
    if caches is None:
        language = model.config.language
        empty = torch.zeros(
            1, language.num_key_value_heads, 0, language.head_dim, device=model.device, dtype=model.dtype
        )
        caches = [LayerCache(empty, empty)] * language.num_hidden_layers
        nothing = torch.zeros(0, dtype=torch.int64, device=model.device)
        fields = dict.fromkeys(("token_ids", "position_ids", "image_shapes", "source_pixels"), nothing)
        for key in keys:
            done[key] = _Prefix(caches, 0, 0, fields)


class _Fed(NamedTuple):
    """One block as B requests give it to the transformer; all tensors but ``tokens`` are int64.

    Attributes:
        tokens: hidden states.
        positions: rotary positions ``[T]``, or ``[1]`` for an image.
        ids: embedded ids ``[B, T]``, or the markers ``[B, 2]``.
        image_shape: pixels or latents ``[3]``, empty for text.
        pixel_digests: ``[B, n]``, digests of the source's pixels, empty for text.
    """

    tokens: Tokens
    positions: Tensor
    ids: Tensor
    image_shape: Tensor
    pixel_digests: Tensor

    @property
    def num_tokens(self) -> int:
        """T, padding included."""
        return self.tokens.und.shape[1] + (0 if self.tokens.gen is None else self.tokens.gen.shape[1])


def _embed(model: Bagel, number: int, blocks: list[Block], requests: list[ContextRequest]) -> _Fed:
    first = blocks[0]
    nothing = torch.zeros(0, dtype=torch.int64, device=model.device)
    if first.kind == "text":
        longest = max(block.num_tokens for block in blocks)
        filler = model.config.tokens.eos_token_id
        ids = torch.tensor(
            [[*block.token_ids, *[filler] * (longest - block.num_tokens)] for block in blocks],
            device=model.device,
        )
        positions = torch.arange(first.rope_position, first.rope_position + longest, device=model.device)
        return _Fed(model.text_block(ids), positions, ids, nothing, nothing.expand(len(blocks), 0))
    position = torch.tensor([first.rope_position], device=model.device)
    markers = torch.tensor(first.token_ids, device=model.device)
    sources = [request.source for request in requests]
    if first.kind == "vae":
        images = torch.stack([source.vae_latent for source in sources]).to(model.device)
        tokens = model.vae_block(markers, images, first.grid)
        read = [source.vae_latent if source.vae_pixels is None else source.vae_pixels for source in sources]
    else:
        images = torch.stack([source.vit_pixels for source in sources]).to(model.device)
        tokens = model.vit_block(markers, images, first.grid)
        read = list(images)
    shape = torch.tensor(images.shape[1:], device=model.device)
    digests = tensor_digest([pixels.to(model.device) for pixels in read])
    return _Fed(tokens, position, markers.expand(len(blocks), 2), shape, digests)


def _assemble(
    model: Bagel, requests: Sequence[ContextRequest], name: str, prefixes: list[_Prefix]
) -> Context:
    """Stack the groups' prefixes, padded to the longest."""
    lengths = tuple(prefix.length for prefix in prefixes)
    width = max(lengths)
    runs = _runs(prefixes, model.device)
    layers = [
        LayerCache(
            *(
                torch.cat([_padded(run.layers[index][side], run.rows, width) for run in runs])
                for side in (0, 1)
            )
        )
        for index in range(model.config.language.num_hidden_layers)
    ]
    uneven = any(length != width for length in lengths)
    offsets = [request.layout.context(name).rope_offset for request in requests]
    return Context(
        layers=layers,
        lengths=lengths,
        prefix_lengths=torch.tensor(lengths, dtype=torch.int32, device=model.device) if uneven else None,
        rope_offsets=torch.tensor(offsets, dtype=torch.int64, device=model.device),
        fields=tuple(prefix.fields for prefix in prefixes),
    )


class _Run(NamedTuple):
    """Neighbours from one prefill, which are taken in one indexing: its caches, and their rows int64 ``[g]`` of these."""

    layers: list[LayerCache]
    rows: Tensor


def _runs(prefixes: list[_Prefix], device: torch.device) -> list[_Run]:
    found: list[tuple[list[LayerCache], list[int]]] = []
    for prefix in prefixes:
        if not found or found[-1][0] is not prefix.layers:
            found.append((prefix.layers, []))
        found[-1][1].append(prefix.row)
    return [_Run(layers, torch.tensor(rows, device=device)) for layers, rows in found]


def _padded(cache: Tensor, rows: Tensor, width: int) -> Tensor:
    """Rows of ``[B, Hk, P, D]``, cut or padded with zeros to ``[g, Hk, width, D]``."""
    taken = cache[rows, :, : min(width, cache.shape[2])]
    return F.pad(taken, (0, 0, 0, width - taken.shape[2]))
