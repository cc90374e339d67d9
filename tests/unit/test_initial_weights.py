"""`init_from` before anything is started: the folder, and whether the recipe's model is the one in it."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from transformers import LlamaConfig

from surefoot import preflight
from surefoot.checkpoint.attempts import AttemptLog, Source, StartsFrom
from surefoot.checkpoint.store import LocalStore
from surefoot.errors import UsageError
from surefoot.initial_weights import check_init_from
from surefoot.spec import JobSpec, ModelSpec, parse_spec

MODEL = {
    "vocab_size": 512, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "weights"
    folder.mkdir()
    save_file({"a": np.ones(2)}, folder / "model.safetensors")
    return folder


def spec_of(folder: Path, *, recipe: bool, **changes: Any) -> JobSpec:
    data = {"job": "j", "storage": folder.parent / "storage", "init_from": folder} | changes
    own = {"entrypoint": "train.py"}
    built_in = {"entrypoint": "-m surefoot_worker.recipe", "recipe": {"model": MODEL}}
    return parse_spec(data | (built_in if recipe else own))


def configure(folder: Path, **changes: Any) -> None:
    config = json.loads(LlamaConfig(**MODEL, num_key_value_heads=2).to_json_string())
    (folder / "config.json").write_text(json.dumps(config | changes))


def test_the_folder_is_looked_at_before_the_start(folder: Path) -> None:
    for recipe in (False, True):
        with pytest.raises(UsageError, match=r"init_from: .*config\.json"):
            check_init_from(spec_of(folder, recipe=recipe))
    assert check_init_from in preflight.CHECKS
    configure(folder)
    for recipe in (False, True):
        check_init_from(spec_of(folder, recipe=recipe))
    check_init_from(spec_of(folder, recipe=False).model_copy(update={"init_from": None}))


def test_a_job_that_has_begun_goes_on_without_the_folder(tmp_path: Path) -> None:
    spec = spec_of(tmp_path / "gone", recipe=False)
    with pytest.raises(UsageError, match="is not a folder"):
        check_init_from(spec)
    AttemptLog(LocalStore(spec.storage / spec.job)).claim(
        after=0, starts_from=StartsFrom(attempt=0, step=0, source=Source.SEED), cause="first", world_size=1,
        host="box", started_at=datetime.now(UTC),
    )  # fmt: skip
    check_init_from(spec)


@pytest.mark.parametrize("key", ModelSpec.model_fields)
def test_every_key_of_the_recipes_model_is_compared(folder: Path, key: str) -> None:
    other = (not MODEL[key]) if isinstance(MODEL[key], bool) else MODEL[key] * 2
    configure(folder, **{key: other, "head_dim": 16, "num_key_value_heads": 2})
    with pytest.raises(UsageError) as caught:
        check_init_from(spec_of(folder, recipe=True))
    assert caught.value.key == f"recipe.model.{key}"
    assert f"is {MODEL[key]}, but" in caught.value.problem
    assert str(other) in caught.value.problem


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "mistral"},
        {"num_key_value_heads": 1},
        {"head_dim": 8},
        {"hidden_act": "gelu"},
        {"rms_norm_eps": 1e-5},
        {"rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}},
        {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "llama3"}},
        {"rope_parameters": None, "rope_theta": 500000.0},
        {"attention_bias": True},
        {"mlp_bias": True},
    ],
    ids=str,
)
def test_what_the_recipe_cannot_have_is_refused(folder: Path, changes: dict[str, Any]) -> None:
    configure(folder, **changes)
    with pytest.raises(UsageError, match="a script of your own") as caught:
        check_init_from(spec_of(folder, recipe=True))
    assert caught.value.key == "init_from"
    check_init_from(spec_of(folder, recipe=False))


def test_what_older_versions_of_transformers_leave_out_has_their_defaults(folder: Path) -> None:
    config = {"model_type": "llama", **MODEL}
    (folder / "config.json").write_text(json.dumps(config))
    check_init_from(spec_of(folder, recipe=True))
    del config["tie_word_embeddings"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match="tie_word_embeddings"):
        check_init_from(spec_of(folder, recipe=True))
    del config["hidden_size"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match=r"hidden_size: is 32, but .* does not say"):
        check_init_from(spec_of(folder, recipe=True))
