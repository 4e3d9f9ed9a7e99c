# SPDX-License-Identifier: Apache-2.0
"""Prompts to token ids, without the bos and eos that the layout adds."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from unirl.models.bagel.config import BagelConfig

NUM_BYTES = 256


class Tokenizer(Protocol):
    """Text to ids."""

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``, without special tokens."""


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255; special tokens follow them in the vocabulary."""

    def encode(self, text: str) -> list[int]:
        """One id a byte."""
        return list(text.encode("utf-8"))


class PretrainedTokenizer:
    """The tokenizer stored in a public checkpoint folder."""

    def __init__(self, folder: str | Path) -> None:
        from transformers import AutoTokenizer  # heavy, and only public checkpoints need it

        self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``, without special tokens."""
        return self._tokenizer.encode(text, add_special_tokens=False)


def load_tokenizer(config: BagelConfig, folder: str | Path | None) -> Tokenizer:
    """Bytes for a model whose vocabulary is bytes and its special tokens, otherwise the folder's tokenizer.

    Raises:
        ValueError: the vocabulary is not bytes and the folder holds no tokenizer.
    """
    if config.tokens.bos_token_id == NUM_BYTES:
        return ByteTokenizer()
    if folder is None or not (Path(folder) / "tokenizer_config.json").is_file():
        raise ValueError(
            f"a BAGEL of {config.language.vocab_size} tokens needs its tokenizer files; none in {folder} "
            "(tokenizer_config.json is missing)"
        )
    return PretrainedTokenizer(folder)
