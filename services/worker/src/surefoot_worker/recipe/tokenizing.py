"""A byte-level BPE tokenizer, trained on the recipe's text, and the text as tokens.

Only the process that prepares the data imports this: the tokenizer library costs 20 ms of a restart otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from surefoot_worker.recipe.corpus import Piece

END_OF_TEXT = "<|endoftext|>"
"""Follows each document; token 0."""
TRAINING_BYTES = 32 * 2**20
"""Merges hardly change with more text than this, and it bounds the time (about 6 s)."""

_BATCH_CHARACTERS = 4 * 2**20


def train_tokenizer(pieces: Iterable[Piece], vocab_size: int) -> Any:
    """Return a `tokenizers.Tokenizer` of at most vocab_size tokens (fewer when the text has too few pairs)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_limited(pieces), trainer)
    return tokenizer


def encode(tokenizer: Any, pieces: Iterable[Piece]) -> Iterator[npt.NDArray[np.int64]]:
    """Yield the tokens of the pieces in order, each piece followed by END_OF_TEXT."""
    for texts in _batches(pieces):
        for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False):
            yield np.array(encoding.ids, np.int64)


def _batches(pieces: Iterable[Piece]) -> Iterator[list[str]]:
    texts: list[str] = []
    num_characters = 0
    for piece in pieces:
        for text in piece.chunks():
            texts.append(text)
            num_characters += len(text)
            if num_characters >= _BATCH_CHARACTERS:
                yield texts
                texts, num_characters = [], 0
        # The tokenizer knows it as one token.
        texts.append(END_OF_TEXT)
    yield texts


def _limited(pieces: Iterable[Piece]) -> Iterator[str]:
    left = TRAINING_BYTES
    for piece in pieces:
        for text in piece.chunks():
            yield text
            left -= len(text)
            if left <= 0:
                return
