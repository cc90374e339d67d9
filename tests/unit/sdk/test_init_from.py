"""Models of transformers out of a checkpoint and into a model: names, ties, dtypes, and what does not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from helpers.model_checkpoints import commit_shards
from helpers.shards import plain_shards
from surefoot.checkpoint.export import export_checkpoint
from surefoot.checkpoint.hugging_face import HuggingFaceFolder
from surefoot.checkpoint.ids import CheckpointId
from surefoot.checkpoint.store import LocalStore
from surefoot.errors import UsageError
from surefoot.sdk.hugging_face import MAX_CONFIG_BYTES, describe_model
from surefoot.sdk.init_from import load_weights
from surefoot.sdk.state import TrainingState

SIZES: dict[str, Any] = {
    "vocab_size": 37, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
GPT2_SIZES = {"vocab_size": 37, "n_embd": 16, "n_layer": 1, "n_head": 2, "bos_token_id": None, "eos_token_id": None}
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False)),
    "llama-tied": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "llama-bf16": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)).to(torch.bfloat16),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**GPT2_SIZES)),
    "qwen2-tied": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=2, num_experts_per_tok=1)),
}
TOKENS = torch.arange(24).view(2, 12) % 37


def build(kind: str, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    return MODELS[kind]()


def assert_equal(ours: nn.Module, theirs: nn.Module) -> None:
    expected = theirs.state_dict()
    assert ours.state_dict().keys() == expected.keys()
    for name, tensor in ours.state_dict().items():
        assert tensor.dtype == expected[name].dtype, name
        assert torch.equal(tensor, expected[name]), name


def commit(model: nn.Module, job: Path) -> tuple[LocalStore, CheckpointId]:
    """A checkpoint of two ranks, as the sdk stages it."""
    state = TrainingState(model, torch.optim.SGD(model.parameters()), {})
    tensors, scalars = state.capture()
    about = {"state": scalars, "hf_config": describe_model(model, None)}
    commit_shards(job, CheckpointId(1, 5), plain_shards(state, tensors, 2), json.loads(json.dumps(about)))
    return LocalStore(job), CheckpointId(1, 5)


@pytest.mark.parametrize("kind", MODELS)
def test_models_of_transformers_go_out_and_come_in_bit_equal(kind: str, tmp_path: Path) -> None:
    """Checkpoint, export, AutoModelForCausalLM, and `init_from` into another model of the kind."""
    model = build(kind, seed=1)
    folder = export_checkpoint(*commit(model, tmp_path / "job"), tmp_path / "out", max_file_bytes=5000).folder
    opened = AutoModelForCausalLM.from_pretrained(folder)
    assert type(opened) is type(model)
    assert_equal(opened, model)
    assert torch.equal(opened.eval()(TOKENS).logits, model.eval()(TOKENS).logits)
    other = build(kind, seed=2)
    load_weights(other, HuggingFaceFolder(folder, "init_from"))
    assert_equal(other, model)


@pytest.mark.parametrize("kind", ["llama", "llama-tied", "llama-bf16", "gpt2", "qwen2-tied"])
def test_what_save_pretrained_writes_comes_in_and_ours_looks_alike(kind: str, tmp_path: Path) -> None:
    model = build(kind, seed=1)
    model.save_pretrained(tmp_path / "theirs")
    other = build(kind, seed=2)
    load_weights(other, HuggingFaceFolder(tmp_path / "theirs", "init_from"))
    assert_equal(other, model)
    ours = export_checkpoint(*commit(model, tmp_path / "job"), tmp_path / "ours").folder
    assert load_file(ours / "model.safetensors").keys() == load_file(tmp_path / "theirs" / "model.safetensors").keys()
    assert json.loads((ours / "config.json").read_text()) == json.loads((tmp_path / "theirs/config.json").read_text())


class Odd(nn.Module):
    """Ties of its own, a buffer, an integer, a scalar; copies what it gives out, as some wrappers do."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 4, bias=False)
        self.b = nn.Linear(3, 4, bias=False)
        self.b.weight = self.a.weight
        self.norm = nn.BatchNorm1d(4)
        self.gain = nn.Parameter(torch.randn(()))

    def state_dict(self, *args: Any, **keywords: Any) -> dict[str, Any]:
        return {name: value.detach().clone() for name, value in super().state_dict(*args, **keywords).items()}


def write(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any] | None = None) -> HuggingFaceFolder:
    folder.mkdir(exist_ok=True)
    save_file({name: value.clone() for name, value in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config or {}))
    return HuggingFaceFolder(folder, "init_from")


def test_a_model_with_a_way_of_its_own_to_give_its_state(tmp_path: Path) -> None:
    torch.manual_seed(1)
    source = Odd()
    source.norm(torch.randn(5, 4))
    other = Odd()
    load_weights(other, write(tmp_path / "f", source.state_dict()))
    assert_equal(other, source)
    assert other.a.weight is other.b.weight


def test_a_compiled_model_is_filled_under_its_plain_names(tmp_path: Path) -> None:
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    load_weights(torch.compile(other, backend="eager"), write(tmp_path / "f", model.state_dict()))
    assert_equal(other, model)


def test_what_does_not_fit_is_named_and_changes_nothing(tmp_path: Path) -> None:
    model = build("llama-tied", seed=1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    good = {name: value for name, value in before.items() if name != "lm_head.weight"}

    def refused(tensors: dict[str, torch.Tensor], config: dict[str, Any] | None = None) -> str:
        with pytest.raises(UsageError) as caught:
            load_weights(model, write(tmp_path / "f", tensors, config))
        assert caught.value.key == "init_from"
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        return caught.value.problem

    other = {name: value + 1 for name, value in good.items()}
    missing = {name: value for name, value in other.items() if "mlp" not in name}
    assert "lacks model.layers.0.mlp.gate_proj.weight, " in refused(missing)
    assert "and 3 more" in refused(missing)
    assert "it has surplus, which the model has not" in refused(other | {"surplus": torch.ones(2)})
    norm = "model.norm.weight"
    assert f"{norm} has shape [8] in" in refused(other | {norm: torch.ones(8)})
    assert "only" not in refused(other | {norm: torch.ones(16, dtype=torch.int32)})
    assert "has dtype I32 in" in refused(other | {norm: torch.ones(16, dtype=torch.int32)})
    assert "two different ones" in refused(other | {"lm_head.weight": torch.ones(37, 16)})
    load_weights(model, write(tmp_path / "f", other | {"lm_head.weight": other["model.embed_tokens.weight"]}))
    untied = build("llama", seed=1)
    with pytest.raises(UsageError, match=r"lacks lm_head\.weight.*tie_word_embeddings"):
        load_weights(untied, write(tmp_path / "f", other, {"tie_word_embeddings": True}))


def test_models_of_other_kinds_have_no_config() -> None:
    class Configured(nn.Linear):
        config: ClassVar = {"model_type": "llama"}

    assert describe_model(nn.Linear(2, 2), None) is None
    assert describe_model(Configured(2, 2), None) is None


def test_a_compiled_model_is_described_as_itself() -> None:
    facts = describe_model(torch.compile(build("llama-tied", seed=1), backend="eager"), None)
    assert facts is not None
    assert facts["config"]["architectures"] == ["LlamaForCausalLM"]
    assert facts["tied_names"] == ["lm_head.weight"]


def test_a_config_that_is_too_long_for_every_snapshot_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    model = build("llama", seed=1)
    model.config.label2id = {f"label {i}" * 4: i for i in range(MAX_CONFIG_BYTES // 32)}
    assert describe_model(model, None) is None
    assert "--config" in caplog.text


def test_the_tokenizer_is_kept_by_path_and_checksum(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    facts = describe_model(build("llama", seed=1), tmp_path / "tokenizer.json")
    assert facts is not None
    assert facts["tokenizer"]["path"] == str(tmp_path / "tokenizer.json")
    assert len(facts["tokenizer"]["xxh3_128"]) == 32
    with pytest.raises(UsageError, match="tokenizer"):
        describe_model(build("llama", seed=1), tmp_path / "nowhere.json")
