"""Is `init_from` of a spec a folder that the job can begin with? Asked before anything is started, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surefoot.checkpoint.attempts import AttemptLog
from surefoot.checkpoint.hugging_face import CONFIG_FILE, HuggingFaceFolder
from surefoot.checkpoint.store import LocalStore
from surefoot.errors import UsageError
from surefoot.spec import JobSpec, ModelSpec

_MISSING = object()


def check_init_from(spec: JobSpec) -> None:
    """Refuse a folder that cannot be used, or does not fit the recipe's model.

    An own script's job that has attempts goes on without the folder; the recipe reads its tokenizer at every start.

    Raises:
        UsageError: names the key and what is allowed.
        OSError: the disk fails.
    """
    if spec.init_from is None:
        return
    if spec.recipe is None and AttemptLog(LocalStore(spec.storage / spec.job)).newest() is not None:
        return
    folder = HuggingFaceFolder(spec.init_from, "init_from")
    if spec.recipe is not None:
        check_recipe_fits(folder, spec.recipe.model)


def check_recipe_fits(folder: HuggingFaceFolder, model: ModelSpec) -> None:
    """Compare a folder's config.json with the model that the recipe builds.

    Raises:
        UsageError: names the first key that differs: one of the spec, or `init_from` for what the recipe cannot have.
    """
    path = folder.path / CONFIG_FILE
    for key, ours in model.model_dump().items():
        theirs = folder.config.get(key, _DEFAULTS.get(key, _MISSING))
        if theirs != ours:
            there = "does not say" if theirs is _MISSING else f"says {theirs}"
            raise UsageError(f"recipe.model.{key}", f"is {ours}, but {path} {there}: with init_from they must be equal")
    for key, (ours, theirs) in _fixed(folder.config, model).items():
        if theirs != ours:
            problem = f"{path} has {key} {theirs}; the recipe's model has {ours} and knows no other"
            raise UsageError("init_from", f"{problem}: train it with a script of your own")


_DEFAULTS: Mapping[str, Any] = {"tie_word_embeddings": False}
"""Of transformers' LlamaConfig: older versions write only what differs from it."""


def _fixed(config: Mapping[str, Any], model: ModelSpec) -> dict[str, tuple[Any, Any]]:
    """Return (recipe's, folder's) of what makes another function of the same weights; see LlamaConfig for defaults."""
    heads = model.num_attention_heads
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return {
        "model_type": ("llama", config.get("model_type")),
        "num_key_value_heads": (heads, config.get("num_key_value_heads") or heads),
        "head_dim": (model.hidden_size // heads, config.get("head_dim") or model.hidden_size // heads),
        "hidden_act": ("silu", config.get("hidden_act", "silu")),
        "rms_norm_eps": (1e-6, config.get("rms_norm_eps", 1e-6)),
        "rope_theta": (10000.0, rope.get("rope_theta", config.get("rope_theta", 10000.0))),
        "rope_type": ("default", rope.get("rope_type", rope.get("type", "default"))),
        "attention_bias": (False, config.get("attention_bias", False)),
        "mlp_bias": (False, config.get("mlp_bias", False)),
    }
