"""A byte-level BPE tokenizer, trained on the recipe's text, or the one of `init_from`; and the text as tokens.

Only the process that prepares the data imports this: the tokenizer library costs 20 ms of a restart otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from surefoot.checkpoint.hugging_face import CONFIG_FILE, TOKENIZER_CONFIG_FILE, TOKENIZER_FILE
from surefoot.errors import UsageError
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


def load_given_tokenizer(folder: Path, vocab_size: int) -> tuple[Any, str]:
    """Return the `tokenizers.Tokenizer`, and the text of the token that follows each document.

    Args:
        folder: From `find_given_tokenizer`.
        vocab_size: Of the model: tokens must be less.

    Raises:
        UsageError: it cannot be used; says why.
    """
    path = folder / TOKENIZER_FILE
    if "model" not in _read(path):
        raise UsageError("init_from", f"{path} is not a tokenizer of the tokenizers library")
    tokenizer = Tokenizer.from_file(str(path))
    size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if size > vocab_size:
        raise UsageError("recipe.model.vocab_size", f"is {vocab_size}, but {path} has {size} tokens: allowed is more")
    for text in _end_of_text(folder, tokenizer):
        if len(tokenizer.encode(text, add_special_tokens=False).ids) == 1:
            return tokenizer, text
    problem = f"{folder} names no token that ends a text: {TOKENIZER_CONFIG_FILE} needs an eos_token"
    raise UsageError("init_from", f"{problem} (or {CONFIG_FILE} an eos_token_id) that {TOKENIZER_FILE} knows")


def _end_of_text(folder: Path, tokenizer: Any) -> Iterator[str]:
    token = _read(folder / TOKENIZER_CONFIG_FILE).get("eos_token")
    token = token.get("content") if isinstance(token, dict) else token
    number = _read(folder / CONFIG_FILE).get("eos_token_id")
    number = number[0] if isinstance(number, list) and number else number
    if isinstance(number, int):
        token = token or tokenizer.id_to_token(number)
    if isinstance(token, str) and token:
        yield token
    yield END_OF_TEXT


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def encode(
    tokenizer: Any, pieces: Iterable[Piece], end_of_text: str = END_OF_TEXT
) -> Iterator[npt.NDArray[np.int64]]:
    """Yield the tokens of the pieces in order, each piece followed by `end_of_text`."""
    for texts in _batches(pieces, end_of_text):
        for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False):
            yield np.array(encoding.ids, np.int64)


def _batches(pieces: Iterable[Piece], end_of_text: str) -> Iterator[list[str]]:
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
        texts.append(end_of_text)
    yield texts


def _limited(pieces: Iterable[Piece]) -> Iterator[str]:
    left = TRAINING_BYTES
    for piece in pieces:
        for text in piece.chunks():
            yield text
            left -= len(text)
            if left <= 0:
                return
