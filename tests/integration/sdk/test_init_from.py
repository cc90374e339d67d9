"""Weights out of a job and into one: export, AutoModelForCausalLM, `init_from`; with real ranks and the real recipe."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from helpers.forked import Child, Forge
from helpers.init_from_rank import logits_of, tiny_config
from helpers.jobs import Job
from helpers.sharded_rank import Net
from surefoot.checkpoint.catalog import list_committed
from surefoot.checkpoint.export import export_checkpoint
from surefoot.checkpoint.importing import import_checkpoint
from surefoot.checkpoint.staging_folder import staging_folder_path
from surefoot.checkpoint.store import LocalStore
from surefoot.events import DataPrepared, StepCompleted

LIMIT_SECONDS = 100


@pytest.fixture(scope="module")
def forge() -> Iterator[Forge]:
    with Forge("helpers.init_from_rank") as forge:
        yield forge


@pytest.fixture(autouse=True)
def no_staging_left(tmp_path: Path) -> Iterator[None]:
    yield
    for job in ("first", "second", "third"):
        shutil.rmtree(staging_folder_path(Path("/dev/shm"), job, tmp_path / "checkpoints"), ignore_errors=True)


def run(forge: Forge, function: str, num_ranks: int, folder: Path, **arguments: Any) -> list[int]:
    (folder / "rendezvous").unlink(missing_ok=True)
    sizes = {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
    children: list[Child] = [
        forge.fork(
            function,
            {"folder": str(folder), **arguments},
            log=folder / f"log-{rank}",
            env=sizes | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(num_ranks)
    ]
    try:
        return [child.wait(LIMIT_SECONDS) for child in children]
    finally:
        for child in children:
            child.kill()


def logs(folder: Path) -> str:
    return "\n".join(path.read_text()[-2000:] for path in sorted(folder.glob("log-*")))


def train(forge: Forge, folder: Path, job: str, attempt: int, num_ranks: int = 2, **arguments: Any) -> dict[str, Any]:
    arguments = {"steps": 12, "init_from": None, "learning_rate": 0.01, "dtype": "float32"} | arguments
    assert not any(run(forge, "train", num_ranks, folder, job=job, **arguments)), logs(folder)
    result: dict[str, Any] = torch.load(folder / f"{job}-{attempt}.pt", weights_only=True)
    return result


def net_folder(folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    folder.mkdir(parents=True)
    torch.manual_seed(5)
    state = {name: torch.randn_like(value).to(dtype) for name, value in Net().state_dict().items()}
    del state["head.weight"]  # tied
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


def test_every_rank_takes_its_part_however_the_model_is_sharded(forge: Forge, tmp_path: Path) -> None:
    """Plain, DDP, FSDP2, HSDP, tensor-parallel, both and by columns, of 4 ranks; uneven and empty chunks; from bf16."""
    weights = net_folder(tmp_path / "weights", torch.bfloat16)
    assert not any(run(forge, "load_parts", 4, tmp_path, weights=str(weights))), logs(tmp_path)
    by_rank = json.loads((tmp_path / "wrong.json").read_text())
    assert len(by_rank) == 4
    for wrong in by_rank:
        assert len(wrong) == 9
        assert not any(wrong.values()), wrong


def test_a_folder_that_one_rank_cannot_use_is_refused_by_all(forge: Forge, tmp_path: Path) -> None:
    good, cut = net_folder(tmp_path / "good"), net_folder(tmp_path / "cut")
    state = load_file(cut / "model.safetensors")
    save_file({name: value for name, value in state.items() if name != "gain"}, cut / "model.safetensors")
    run(forge, "refuse_together", 2, tmp_path, weights={"0": str(good), "1": str(cut)})
    told = [(tmp_path / f"told-{rank}").read_text() for rank in range(2)]
    assert told[0] == told[1]
    assert told[0].startswith("init_from:")
    assert "it lacks gain" in told[0]


def test_what_was_trained_goes_out_as_a_folder_and_into_the_next_job(forge: Forge, tmp_path: Path) -> None:
    """Train on 2 ranks, export, open with AutoModelForCausalLM, begin another job, which never reads it again."""
    trained = train(forge, tmp_path, "first", 1)
    assert trained["losses"][-1] < trained["losses"][0] - 0.2  # or else nothing below would mean anything
    store = LocalStore(tmp_path / "checkpoints" / "first")
    out = export_checkpoint(store, list_committed(store)[-1], tmp_path / "out", max_file_bytes=4000).folder
    model = AutoModelForCausalLM.from_pretrained(out)
    assert isinstance(model, LlamaForCausalLM)
    assert model.dtype == torch.float32
    assert torch.equal(logits_of(model), trained["end"])

    begun = train(forge, tmp_path, "second", 1, num_ranks=1, steps=3, init_from=str(out))
    assert torch.equal(begun["start"], trained["end"])
    assert abs(begun["losses"][0] - trained["losses"][-1]) < 0.25
    for path in out.glob("*.safetensors"):
        path.unlink()
    went_on = train(forge, tmp_path, "second", 2, num_ranks=2, steps=5, init_from=str(out))
    assert torch.equal(went_on["start"], begun["end"])


def test_an_imported_checkpoint_goes_on_where_it_stood(forge: Forge, tmp_path: Path) -> None:
    """Optimizer and data order too: the new job ends with the same weights, to the bit, as the old one does."""
    train(forge, tmp_path, "first", 1, num_ranks=1, steps=4)
    store = LocalStore(tmp_path / "checkpoints" / "first")
    imported = LocalStore(tmp_path / "checkpoints" / "third")
    import_checkpoint(store, list_committed(store)[-1], imported, copy=False)
    new = train(forge, tmp_path, "third", 2, num_ranks=1, steps=7)
    old = train(forge, tmp_path, "first", 2, num_ranks=1, steps=7)
    assert len(new["losses"]) == 3
    assert new["losses"] == old["losses"]
    assert torch.equal(new["end"], old["end"])


def test_weights_are_cast_to_the_models_dtype(forge: Forge, tmp_path: Path) -> None:
    torch.manual_seed(9)
    source = LlamaForCausalLM(tiny_config(tie_word_embeddings=True)).to(torch.bfloat16)
    source.save_pretrained(tmp_path / "bf16", max_shard_size="3KB")
    begun = train(forge, tmp_path, "first", 1, num_ranks=1, steps=1, init_from=str(tmp_path / "bf16"))
    # Not source.float(): bf16 has rounded its rotary frequencies too, which are not in a folder.
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "bf16", dtype=torch.float32)
    assert torch.equal(begun["start"], logits_of(expected))


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    words = ["rank", "shard", "loss", "step", "gather", "attempt"]
    for number in range(30):
        lines = [" ".join(words[(i * j + number) % 6] for j in range(1, 9)) for i in range(60)]
        (folder / f"{number}.txt").write_text("\n".join(lines))
    return folder


@pytest.mark.slow
@pytest.mark.timeout(3 * LIMIT_SECONDS)
def test_the_recipe_goes_on_from_an_exported_folder_with_its_tokenizer(tmp_path: Path, corpus: Path) -> None:
    """`surefoot run` with the recipe, export, tokenizer and model opened by transformers, `init_from` in a new spec."""
    recipe = {
        "data": str(corpus), "cache_dir": str(tmp_path / "cache"), "sequence_length": 16, "global_batch_size": 8,
        "steps": 20, "warmup_steps": 2, "learning_rate": 0.01, "precision": "fp32",
        "model": {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
                  "num_attention_heads": 2},
    }  # fmt: skip
    entrypoint = "-m surefoot_worker.recipe"
    first = Job(tmp_path / "first", "first", nproc=1, entrypoint=entrypoint, spec={"recipe": recipe})
    first.run(timeout=LIMIT_SECONDS)
    losses = [event.loss for event in first.events(StepCompleted)]
    exported = export_checkpoint(first.store, first.committed()[-1], tmp_path / "out")
    assert exported.note == ""
    tokenizer = AutoTokenizer.from_pretrained(exported.folder)
    ids = tokenizer("rank shard loss", return_tensors="pt").input_ids
    assert tokenizer.decode(ids[0]) == "rank shard loss"
    assert AutoModelForCausalLM.from_pretrained(exported.folder)(ids).logits.shape == (1, ids.shape[1], 320)

    recipe |= {"cache_dir": str(tmp_path / "other"), "learning_rate": 1e-4, "steps": 2}
    spec = {"recipe": recipe, "init_from": str(exported.folder)}
    second = Job(tmp_path / "second", "second", nproc=1, entrypoint=entrypoint, spec=spec)
    second.run(timeout=LIMIT_SECONDS)
    assert abs(second.events(StepCompleted)[0].loss - losses[-1]) < 0.3 * (losses[0] - losses[-1])
    assert f"of {exported.folder}" in second.events(DataPrepared)[0].detail

    recipe["model"]["intermediate_size"] = 64
    third = Job(tmp_path / "third", "third", nproc=1, entrypoint=entrypoint, spec=spec)
    refused = third.run(timeout=LIMIT_SECONDS, expect=2)
    assert "recipe.model.intermediate_size: is 64" in refused.stdout
