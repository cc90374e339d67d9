"""`surefoot verify` and `surefoot checkpoints`: what they find, change, and say; with real folders and a real api."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from helpers.api import Api
from helpers.checkpoints import commit
from helpers.command_line import Result, Surefoot
from helpers.model_checkpoints import Part, commit_model
from helpers.rows import checkpoint_row, job_row
from surefoot.checkpoint.attempts import AttemptLog, Source, StartsFrom
from surefoot.checkpoint.catalog import list_committed
from surefoot.checkpoint.ids import CheckpointId, folder_name
from surefoot.checkpoint.manifest import MANIFEST_FILE
from surefoot.checkpoint.marks import read_pin
from surefoot.checkpoint.store import LocalStore
from surefoot.cli import checkpoint_changes
from surefoot.cli.checkpoints import verify_job

IDS = [CheckpointId(1, 10), CheckpointId(1, 20), CheckpointId(1, 30), CheckpointId(2, 30), CheckpointId(2, 40)]
"""Of two attempts; the second began at step 20, so step 30 of the first is abandoned."""


def begin(store: LocalStore) -> None:
    log = AttemptLog(store)
    common = {"world_size": 2, "host": "box", "started_at": datetime(2026, 12, 1, tzinfo=UTC)}
    log.claim(after=0, starts_from=StartsFrom(attempt=0, step=0, source=Source.SEED), cause="first start", **common)
    log.claim(after=1, starts_from=StartsFrom(attempt=1, step=20, source=Source.COMMITTED), cause="killed", **common)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder without a stack, named by the environment; the present folder is another, empty one."""
    monkeypatch.delenv("SUREFOOT_API_URL", raising=False)
    monkeypatch.setenv("SUREFOOT_HOME", str(tmp_path / "home"))
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    return tmp_path / "home"


@pytest.fixture
def store(home: Path) -> LocalStore:
    store = LocalStore(home / "checkpoints" / "demo")
    begin(store)
    for checkpoint in IDS:
        commit(store.root, checkpoint)
    return store


def steps_of(result: Result) -> list[tuple[int, int]]:
    assert result.code == 0, result.err
    return [(entry["attempt"], entry["step"]) for entry in json.loads(result.out)]


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("words", [["verify"], ["checkpoints", "list"], ["checkpoints", "show"], ["attempts"]])
def test_a_job_is_named_as_well_as_its_folder(surefoot: Surefoot, store: LocalStore, words: list[str]) -> None:
    by_name, by_path = surefoot(*words, "demo", "--json"), surefoot(*words, store.root, "--json")
    assert by_name == by_path
    assert by_name.code == 0
    for wrong in ("other", "Not-A-Name", "no/such/path"):
        refused = surefoot(*words, wrong)
        assert (refused.code, refused.err.count("\n")) == (2, 1)
        assert "allowed: a checkpoint folder" in refused.err


def test_a_path_wins_over_a_job_of_that_name(surefoot: Surefoot, store: LocalStore, tmp_path: Path) -> None:
    commit(tmp_path / "cwd" / "demo", CheckpointId(1, 5))
    assert [v["step"] for v in json.loads(surefoot("verify", "demo", "--json").out)] == [5]


def test_c8_verify_names_the_damaged_file(surefoot: Surefoot, store: LocalStore) -> None:
    """Case C8: exit status 3 and the file's path."""
    path = store.root / folder_name(IDS[2]) / "rank-00001.safetensors"
    flip_a_byte(path)
    result = surefoot("verify", "demo")
    assert (result.code, str(path) in result.out) == (3, True)


def make_odd(folder: Path, how: str) -> None:
    """Put something in the place of a file: a directory, a link to itself, a FIFO, or a newer format's manifest."""
    path = folder / ("rank-00000.safetensors" if how.startswith("shard") else MANIFEST_FILE)
    path.unlink()
    if how.endswith("folder"):
        path.mkdir()
    elif how.endswith("loop"):
        path.symlink_to(path.name)
    elif how.endswith("fifo"):
        os.mkfifo(path)
    else:
        path.write_text('{"version":2,"something":"new"}\n')


ODD = {
    "folder": "Is a directory",
    "loop": "Too many levels of symbolic links",
    "fifo": "Is not a regular file",
    "version": "has format version 2",
}


@pytest.mark.parametrize("how", [*ODD, "shard folder", "shard loop", "shard fifo"])
def test_one_that_cannot_be_read_hides_no_other(surefoot: Surefoot, store: LocalStore, how: str) -> None:
    names = [folder_name(i) for i in IDS]
    make_odd(store.root / names[1], how)
    path = str(store.root / names[1] / ("rank-00000.safetensors" if "shard" in how else MANIFEST_FILE))
    verified = surefoot("verify", "demo", "--json")
    problems = {Path(v["path"]).name: v["problem"] for v in json.loads(verified.out)}
    assert [name for name in names if problems[name] is None] == [name for name in names if name != names[1]]
    assert problems[names[1]].startswith(f"cannot be read: {path}: ")
    assert ODD[how.removeprefix("shard ")] in problems[names[1]]
    assert verified.code == 1
    assert "4 good, 0 damaged, 1 could not be read" in surefoot("verify", "demo").out
    assert surefoot("verify", store.root / names[1]).code == 1

    listed = json.loads(surefoot("checkpoints", "list", "demo", "--json").out)
    states = {Path(entry["path"]).name: entry["state"] for entry in listed}
    rescanned = surefoot("checkpoints", "rescan", "demo", "--json")
    found = json.loads(rescanned.out)
    is_manifest = "shard" not in how
    assert len(states) == len(IDS)
    assert [name for name, state in states.items() if state == "unreadable"] == ([names[1]] if is_manifest else [])
    assert (found["unreadable"], found["damaged"]) == ([names[1]] if is_manifest else [], [])
    assert rescanned.code == int(is_manifest)

    flip_a_byte(store.root / names[3] / MANIFEST_FILE)
    assert surefoot("verify", "demo").code == 3
    assert surefoot("checkpoints", "rescan", "demo").code == 3
    listed = json.loads(surefoot("checkpoints", "list", "demo", "--json").out)
    assert [Path(e["path"]).name for e in listed if e["state"] == "damaged"] == [names[3]]


def test_a_folder_that_is_a_link_to_itself_hides_no_checkpoint(surefoot: Surefoot, store: LocalStore) -> None:
    name = folder_name(CheckpointId(2, 50))
    (store.root / name).symlink_to(name)
    assert surefoot("verify", "demo").code == 0
    assert len(json.loads(surefoot("checkpoints", "list", "demo", "--json").out)) == len(IDS)
    assert json.loads(surefoot("checkpoints", "rescan", "demo", "--json").out)["not committed"] == [name]


def test_what_goes_while_it_is_verified_is_not_damage(store: LocalStore) -> None:
    store.delete(folder_name(IDS[0]))
    assert [verdict.problem for verdict in verify_job(store.root, list(IDS))] == [None] * (len(IDS) - 1)


def test_pins_are_set_shown_and_taken_back(
    surefoot: Surefoot, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("USER", "anna")
    assert surefoot("checkpoints", "pin", "demo", "--step", 10, "--reason", "for the paper").code == 0
    mark = read_pin(store, IDS[0])
    assert mark is not None
    assert (mark.reason, mark.pinned_by) == ("for the paper", "anna")
    entries = json.loads(surefoot("checkpoints", "list", "demo", "--json").out)
    assert [entry["step"] for entry in entries if entry["pinned"]] == [10]
    shown = surefoot("checkpoints", "show", "demo", "--step", 10)
    assert "pinned by anna" in shown.out
    assert "for the paper" in shown.out
    assert json.loads(surefoot("checkpoints", "show", "demo", "--step", 10, "--json").out)["pinned"]["version"] == 1
    folder = store.root / folder_name(IDS[0])
    assert "is no longer pinned" in surefoot("checkpoints", "unpin", folder).out
    assert "was not pinned" in surefoot("checkpoints", "unpin", folder).out
    assert read_pin(store, IDS[0]) is None
    assert surefoot("checkpoints", "pin", "demo", "--reason", " ").code == 2
    assert surefoot("checkpoints", "pin", "demo").code == 2


def test_which_checkpoint_is_meant(surefoot: Surefoot, store: LocalStore) -> None:
    def shown(*words: object) -> object:
        result = surefoot("checkpoints", "show", "demo", *words, "--json")
        if result.code:
            assert result.code == 2, result
            return result.err
        manifest = json.loads(result.out)["manifest"]
        return manifest["attempt"], manifest["step"]

    assert shown() == (2, 40)
    assert shown("--step", 30) == (2, 30)  # the current one
    assert shown("--step", 30, "--attempt", 1) == (1, 30)
    assert shown("--attempt", 1) == (1, 20)  # of it, the newest that is current
    assert "no such checkpoint; allowed, newest first: step 40 of attempt 2" in str(shown("--step", 31))
    assert "--attempt" in str(shown("--attempt", 9))
    single = store.root / folder_name(IDS[0])
    assert surefoot("checkpoints", "show", single, "--step", 10).code == 0
    assert surefoot("checkpoints", "show", single, "--step", 20).code == 2
    LocalStore(store.root).delete("attempts/000002.json")
    LocalStore(store.root).delete("attempts/000001.json")
    assert "--attempt: is needed: step 30 was saved by attempts 1, 2" in str(shown("--step", 30))


def test_prune_removes_what_no_rule_keeps_and_says_why(
    surefoot: Surefoot, store: LocalStore, tmp_path: Path
) -> None:
    surefoot("checkpoints", "pin", "demo", "--step", 30, "--attempt", 1, "--reason", "look into it")
    words = ["checkpoints", "prune", "demo", "--keep-last", 1, "--json"]
    planned = surefoot(*words, "--dry-run")
    assert list_committed(store) == IDS
    doomed = steps_of(planned)
    assert steps_of(surefoot(*words)) == doomed
    assert set(list_committed(store)) == set(IDS) - set(doomed)
    assert {(1, 30), (2, 40), (1, 20)}.isdisjoint(doomed)  # pinned, the newest, what the newest attempt started from
    assert doomed
    assert all(entry["reason"] for entry in json.loads(planned.out))
    assert steps_of(surefoot(*words)) == []
    text = surefoot("checkpoints", "prune", "demo", "--keep-last", 1)
    assert "0 were removed" in text.out


def test_prune_takes_the_rules_of_a_spec(surefoot: Surefoot, store: LocalStore) -> None:
    spec = {"job": "demo", "entrypoint": "train.py", "checkpoint": {"retention": {"keep_last": None}}}
    Path("spec.json").write_text(json.dumps(spec))
    kept_all = steps_of(surefoot("checkpoints", "prune", "demo", "--spec", "spec.json", "--dry-run", "--json"))
    assert kept_all == [(1, 30)]  # abandoned
    words = ["checkpoints", "prune", "demo", "--spec", "spec.json", "--keep-last", 1, "--dry-run", "--json"]
    assert len(steps_of(surefoot(*words))) > 1
    assert surefoot("checkpoints", "prune", "demo", "--spec", "nowhere.json").code == 2
    assert surefoot("checkpoints", "prune", "demo", "--keep-stable", 1).code == 2


def test_rescan_says_what_lies_around(surefoot: Surefoot, store: LocalStore) -> None:
    clean = json.loads(surefoot("checkpoints", "rescan", "demo", "--json").out)
    assert clean["committed"] == sorted(folder_name(i) for i in IDS)
    assert not any(names for what, names in clean.items() if what != "committed")
    store.write(f"{folder_name(CheckpointId(2, 50))}/rank-00000.safetensors", [b"x"])
    store.move(folder_name(IDS[0]), f"quarantine/{folder_name(IDS[0])}")
    (store.root / ".tmp-1-abc-x").mkdir()
    result = surefoot("checkpoints", "rescan", "demo")
    assert (result.code, "no stack runs this job" in result.out) == (0, True)
    found = json.loads(surefoot("checkpoints", "rescan", "demo", "--json").out)
    assert found["not committed"] == [folder_name(CheckpointId(2, 50))]
    assert found["quarantine"] == [folder_name(IDS[0])]
    assert found["temporary"] == [".tmp-1-abc-x"]
    flip_a_byte(store.root / folder_name(IDS[1]) / MANIFEST_FILE)
    damaged = surefoot("checkpoints", "rescan", "demo", "--json")
    assert (damaged.code, json.loads(damaged.out)["damaged"]) == (3, [folder_name(IDS[1])])
    (store.root / folder_name(IDS[1])).rename(store.root / "step-20-a1")
    odd = surefoot("checkpoints", "rescan", "demo", "--json")
    assert (odd.code, json.loads(odd.out)["not understood"]) == (3, ["step-20-a1"])


@pytest.fixture
def in_stack(api: Api, tmp_path: Path) -> LocalStore:
    """A job that the stack runs, and its folder."""
    store = LocalStore(tmp_path / "home" / "checkpoints" / "demo")
    begin(store)
    for checkpoint in IDS:
        commit(store.root, checkpoint)
    spec = {"job": "demo", "entrypoint": "train.py", "storage": str(store.root.parent), "run_dir": str(tmp_path)}
    with api.database.write() as session:
        session.add(job_row("demo", spec=spec))
    return store


def test_a_job_of_a_stack_is_pruned_by_its_writer_alone(
    surefoot: Surefoot, in_stack: LocalStore, tmp_path: Path
) -> None:
    words = ["checkpoints", "prune", in_stack.root, "--keep-last", 1]
    refused = surefoot(*words)
    assert (refused.code, "whose writer prunes it" in refused.err) == (2, True)
    assert surefoot(*words, "--dry-run").code == 0
    assert list_committed(in_stack) == IDS
    elsewhere = LocalStore(tmp_path / "elsewhere" / "demo")
    begin(elsewhere)
    commit(elsewhere.root, IDS[-1])
    assert surefoot("checkpoints", "prune", elsewhere.root).code == 0


def test_rescan_waits_until_the_catalogue_agrees(
    surefoot: Surefoot, in_stack: LocalStore, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_changes, "AGREE_SECONDS", 0.0)
    waiting = surefoot("checkpoints", "rescan", in_stack.root)
    assert (waiting.code, "does not agree yet" in waiting.out) == (1, True)
    with api.database.write() as session:
        session.add_all(checkpoint_row(i.attempt, i.step) for i in IDS)
    agreed = surefoot("checkpoints", "rescan", in_stack.root, "--json")
    assert (agreed.code, json.loads(agreed.out)["catalogue_agrees"]) == (0, True)


@pytest.fixture
def trained(home: Path) -> LocalStore:
    """A job with a model of two tensors, one of them tied."""
    store = LocalStore(home / "checkpoints" / "trained")
    begin(store)
    facts = {"config": {"model_type": "llama"}, "tied_names": ["head"], "tokenizer": None}
    parts = [Part("model.embed", np.arange(12, dtype="float32").reshape(3, 4)), Part("model.w", np.ones(5, "float16"))]
    aliases = {"model.head": "model.embed"}
    for checkpoint in IDS:
        commit_model(store.root, checkpoint, [parts], aliases=aliases, scalars={"hf_config": facts})
    return store


def test_export(surefoot: Surefoot, trained: LocalStore, tmp_path: Path) -> None:
    result = surefoot("checkpoints", "export", "trained", "out")
    assert result.code == 0, result.err
    assert "step-000000040-a0002 of job trained is in out: 2 tensors" in result.out
    assert "--tokenizer" in result.out
    assert load_file("out/model.safetensors").keys() == {"embed", "w"}
    again = surefoot("checkpoints", "export", "trained", "out")
    assert (again.code, "TARGET" in again.err) == (2, True)
    words = ["checkpoints", "export", "trained", "small", "--step", 20, "--max-shard-size", "30B", "--json"]
    report = json.loads(surefoot(*words).out)
    assert (report["step"], report["attempt"]) == (20, 1)
    assert "model-00002-of-00002.safetensors" in report["files"]
    for size in ("", "0", "5 parsecs", "-1GB", "nan"):
        refused = surefoot("checkpoints", "export", "trained", "third", "--max-shard-size", size)
        assert (refused.code, "--max-shard-size" in refused.err) == (2, True)
    Path("config.json").write_text(json.dumps({"hidden_size": 1}))
    for config in ("config.json", "nowhere.json", "."):
        refused = surefoot("checkpoints", "export", "trained", "third", "--config", config)
        assert (refused.code, "--config" in refused.err) == (2, True)
    flip_a_byte(trained.root / folder_name(IDS[-1]) / "rank-00000.safetensors")
    damaged = surefoot("checkpoints", "export", "trained", "third")
    assert (damaged.code, "rank-00000.safetensors" in damaged.err) == (3, True)
    assert not Path("third").exists()


def test_import(surefoot: Surefoot, trained: LocalStore, home: Path, tmp_path: Path) -> None:
    result = surefoot("checkpoints", "import", "trained", "next", "--step", 20)
    assert result.code == 0, result.err
    assert "job next begins at step 20" in result.out
    assert list_committed(LocalStore(home / "checkpoints" / "next")) == [CheckpointId(1, 20)]
    assert surefoot("verify", "next").code == 0
    again = surefoot("checkpoints", "import", "trained", "next")
    assert (again.code, "has attempts already" in again.err) == (2, True)
    folder = trained.root / folder_name(IDS[-1])
    report = json.loads(surefoot("checkpoints", "import", folder, tmp_path / "s" / "far", "--copy", "--json").out)
    assert (report["step"], report["linked"]) == (40, False)
    assert surefoot("verify", tmp_path / "s" / "far").code == 0
    surefoot("checkpoints", "export", "trained", "hf")
    refused = surefoot("checkpoints", "import", "hf", "third")
    assert (refused.code, "init_from" in refused.err) == (2, True)
    assert not (home / "checkpoints" / "third").exists()
