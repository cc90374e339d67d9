"""What a checkpoint keeps of a model of transformers beside its tensors, so that it can be exported without the script.

Nothing of transformers is imported here: models of other kinds just have no config.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch

from surefoot.checkpoint.manifest import checksum
from surefoot.errors import UsageError

MAX_CONFIG_BYTES = 256 * 1024
"""It is written with each snapshot; only configs with label names by the thousand are longer."""

_log = logging.getLogger("surefoot.sdk")


def describe_model(model: torch.nn.Module, tokenizer: Path | None) -> dict[str, Any] | None:
    """Return `hf_config` for the scalars, to be read by `surefoot.checkpoint.export.ModelFacts`.

    Args:
        model: The plain module, compiled or not.
        tokenizer: tokenizer.json of the data; its path and checksum are kept, not its content.

    Returns:
        {"config": content of config.json, "tied_names": [...], "tokenizer": {...} or None}; None when the model has no
        `.config` of transformers.

    Raises:
        UsageError: there is no such tokenizer.
    """
    model = getattr(model, "_orig_mod", model)
    to_json = getattr(getattr(model, "config", None), "to_json_string", None)
    if to_json is None:
        return None
    config = json.loads(to_json())
    if not isinstance(config.get("model_type"), str):
        return None
    config.setdefault("architectures", [type(model).__name__])
    if len(json.dumps(config)) > MAX_CONFIG_BYTES:
        _log.warning("the model's config is too long to be kept; `surefoot checkpoints export` needs it: --config FILE")
        return None
    return {"config": config, "tied_names": _tied_names(model, config), "tokenizer": _describe_tokenizer(tokenizer)}


def _tied_names(model: torch.nn.Module, config: dict[str, Any]) -> list[str]:
    """Return which tensors transformers makes by tying them when it loads the model."""
    tied = getattr(model, "all_tied_weights_keys", None)  # transformers 5: only those that this config ties
    if tied is None:
        tied = getattr(model, "_tied_weights_keys", None) if config.get("tie_word_embeddings", True) else None
    return sorted(tied or ())


def _describe_tokenizer(path: Path | None) -> dict[str, str] | None:
    if path is None:
        return None
    try:
        return {"path": str(path.absolute()), "xxh3_128": checksum(path.read_bytes())}
    except OSError as error:
        raise UsageError("tokenizer", f"{path} cannot be read: {error.strerror}; allowed: a tokenizer.json") from None
