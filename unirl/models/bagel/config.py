# SPDX-License-Identifier: Apache-2.0
"""Dimensions of a BAGEL model, and the presets the project ships.

One architecture serves every size: only the numbers in :class:`BagelConfig` differ between the public
7B checkpoint and the digits model that trains on a laptop core.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONFIG_FILE = "bagel_config.json"
"""File of a checkpoint folder with :meth:`BagelConfig.to_dict`; public checkpoints have their own files."""


@dataclass(frozen=True, kw_only=True)
class LanguageConfig:
    """The Qwen2-shaped decoder with two experts (understanding, generation) in every layer."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1_000_000.0

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_attention_heads


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """The SigLIP-NaViT tower of the understanding side."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    patch_size: int
    num_channels: int = 3
    num_positions: int
    layer_norm_eps: float = 1e-6


@dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """The space that is denoised.

    ``codec`` is ``"flux"`` (diffusers' AutoencoderKL in FLUX's configuration) or ``"pixel"`` (the image
    itself).
    """

    codec: str
    z_channels: int
    downsample: int
    scale_factor: float = 1.0
    shift_factor: float = 0.0
    image_channels: int = 3


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """How a source image is resized for each reader: ``(longest side at most, shortest at least)``."""

    vae: tuple[int, int]
    vit: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class SpecialTokens:
    """Ids that wrap text and images."""

    bos_token_id: int
    eos_token_id: int
    start_of_image: int
    end_of_image: int


@dataclass(frozen=True, kw_only=True)
class BagelConfig:
    """Everything that fixes the shapes and the arithmetic of a BAGEL model.

    Attributes:
        latent_patch_size: side of the square of latent cells that makes one token.
        max_latent_size: rows and columns of the latent position table, so the largest canvas in tokens a
            side.
        vit_max_num_patch_per_side: rows and columns of the vision position table.
        shift: default timestep shift of the sampler (static: it does not depend on the canvas).
        timestep_scale: factor on the time in [0, 1] before its sinusoidal embedding; the public model uses 1.
        batch_invariant: keep a row's results independent of the batch it is computed in, bit for bit: float32
            on a CPU, any dtype on a GPU (see :class:`unirl.models.bagel.layers.Linear`).
    """

    language: LanguageConfig
    vision: VisionConfig
    latent: LatentConfig
    source: SourceConfig
    tokens: SpecialTokens
    latent_patch_size: int
    max_latent_size: int
    vit_max_num_patch_per_side: int
    shift: float = 3.0
    timestep_scale: float = 1.0
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        language, vision = self.language, self.vision
        if language.hidden_size % language.num_attention_heads or language.head_dim % 2:
            raise ValueError(
                f"language.hidden_size {language.hidden_size} must be an even multiple of "
                f"language.num_attention_heads {language.num_attention_heads}"
            )
        if language.num_attention_heads % language.num_key_value_heads:
            raise ValueError(
                f"language.num_attention_heads {language.num_attention_heads} must be a multiple of "
                f"language.num_key_value_heads {language.num_key_value_heads}"
            )
        if vision.hidden_size % vision.num_attention_heads:
            raise ValueError(
                f"vision.hidden_size {vision.hidden_size} must be a multiple of "
                f"vision.num_attention_heads {vision.num_attention_heads}"
            )
        if self.vit_max_num_patch_per_side**2 > vision.num_positions:
            raise ValueError(
                f"vit_max_num_patch_per_side {self.vit_max_num_patch_per_side} needs "
                f"{self.vit_max_num_patch_per_side**2} positions; vision.num_positions is "
                f"{vision.num_positions}"
            )
        if self.batch_invariant and (language.hidden_size % 32 or language.intermediate_size % 32):
            # Vectorised exponentials treat what is left after the last full 32 values by another routine.
            raise ValueError(
                f"batch_invariant needs language.hidden_size {language.hidden_size} and "
                f"language.intermediate_size {language.intermediate_size} to be multiples of 32"
            )
        if self.latent.codec not in ("flux", "pixel"):
            raise ValueError(f"latent.codec is {self.latent.codec!r}; allowed: 'flux', 'pixel'")

    @property
    def pixel_stride(self) -> int:
        """Pixels a side that one latent token covers; a canvas must be a multiple of it."""
        return self.latent.downsample * self.latent_patch_size

    @property
    def latent_channels(self) -> int:
        """Values of one latent token."""
        return self.latent.z_channels * self.latent_patch_size**2

    @property
    def max_canvas(self) -> int:
        """Largest canvas side in pixels that the position table covers."""
        return self.max_latent_size * self.pixel_stride

    def replace(self, **changes: Any) -> BagelConfig:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Plain nested dictionary, the inverse of :meth:`from_dict`."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> BagelConfig:
        """Build from :meth:`to_dict`'s form; an unknown or missing key is a ``ValueError`` that names it."""
        parts = {
            "language": LanguageConfig,
            "vision": VisionConfig,
            "latent": LatentConfig,
            "source": SourceConfig,
            "tokens": SpecialTokens,
        }
        built = dict(values)
        for name, part in parts.items():
            if name in built:
                built[name] = _build(part, name, built[name])
        return _build(cls, "", built)

    def save(self, folder: str | Path) -> None:
        """Write ``bagel_config.json`` into a checkpoint folder."""
        (Path(folder) / CONFIG_FILE).write_text(json.dumps(self.to_dict(), indent=2) + "\n")

    @classmethod
    def load(cls, folder: str | Path) -> BagelConfig:
        """Read ``bagel_config.json``, or the public ``llm_config.json`` and ``vit_config.json``."""
        folder = Path(folder)
        own = folder / CONFIG_FILE
        if own.is_file():
            return cls.from_dict(json.loads(own.read_text()))
        files = [folder / "llm_config.json", folder / "vit_config.json"]
        for path in files:
            if not path.is_file():
                raise ValueError(
                    f"{folder} holds neither {CONFIG_FILE} nor {path.name}: it is no BAGEL checkpoint"
                )
        return _from_public(json.loads(files[0].read_text()), json.loads(files[1].read_text()))


def _build(part: type, name: str, values: dict[str, Any]) -> Any:
    prefix = f"{name}." if name else ""
    fields = {field.name: field for field in dataclasses.fields(part)}
    for key in values:
        if key not in fields:
            raise ValueError(
                f"unknown key {prefix}{key} in a BAGEL configuration; allowed: {', '.join(fields)}"
            )
    for key, field in fields.items():
        if key not in values and field.default is dataclasses.MISSING:
            raise ValueError(f"missing key {prefix}{key} in a BAGEL configuration")
    return part(**{key: tuple(value) if isinstance(value, list) else value for key, value in values.items()})


def _from_public(llm: dict[str, Any], vit: dict[str, Any]) -> BagelConfig:
    """The public checkpoint's own files; what they leave out is the same for every public BAGEL."""
    base = BAGEL_7B_MOT
    language_keys = [field.name for field in dataclasses.fields(LanguageConfig)]
    vision_keys = ["hidden_size", "intermediate_size", "num_attention_heads", "patch_size", "num_channels"]
    return base.replace(
        language=dataclasses.replace(base.language, **{key: llm[key] for key in language_keys if key in llm}),
        vision=dataclasses.replace(base.vision, **{key: vit[key] for key in vision_keys if key in vit}),
    )


BAGEL_7B_MOT = BagelConfig(
    language=LanguageConfig(
        vocab_size=152_064,
        hidden_size=3584,
        intermediate_size=18_944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
    ),
    # SigLIP-so400m has 27 layers; BAGEL drops the last one.
    vision=VisionConfig(
        hidden_size=1152,
        intermediate_size=4304,
        num_hidden_layers=26,
        num_attention_heads=16,
        patch_size=14,
        num_positions=70 * 70,
    ),
    latent=LatentConfig(codec="flux", z_channels=16, downsample=8, scale_factor=0.3611, shift_factor=0.1159),
    source=SourceConfig(vae=(512, 256), vit=(490, 112)),
    tokens=SpecialTokens(
        bos_token_id=151_644, eos_token_id=151_645, start_of_image=151_652, end_of_image=151_653
    ),
    latent_patch_size=2,
    max_latent_size=64,
    vit_max_num_patch_per_side=70,
)

BAGEL_DIGITS = BagelConfig(
    language=LanguageConfig(
        vocab_size=260,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        # Prompts are a few dozen bytes long: a base of 1e6 would leave most rotary frequencies unused.
        rope_theta=1_000.0,
    ),
    vision=VisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        patch_size=2,
        num_channels=1,
        num_positions=64,
    ),
    latent=LatentConfig(codec="pixel", z_channels=1, downsample=1, image_channels=1),
    source=SourceConfig(vae=(16, 2), vit=(16, 2)),
    tokens=SpecialTokens(bos_token_id=256, eos_token_id=257, start_of_image=258, end_of_image=259),
    latent_patch_size=2,
    max_latent_size=8,
    vit_max_num_patch_per_side=8,
    timestep_scale=1000.0,
    batch_invariant=True,
)

PRESETS: dict[str, BagelConfig] = {"bagel-7b-mot": BAGEL_7B_MOT, "bagel-digits": BAGEL_DIGITS}


def preset(name: str) -> BagelConfig:
    """The configuration called ``name``; ``ValueError`` with the known names otherwise."""
    if name not in PRESETS:
        raise ValueError(f"unknown BAGEL preset {name!r}; allowed: {', '.join(sorted(PRESETS))}")
    return PRESETS[name]
