"""Export to a Hugging Face folder and import into another job, without torch; case C8 for both."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import shutil
import signal
import sys
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from helpers.checkpoints import commit
from helpers.model_checkpoints import Part, commit_model, part_of
from surefoot import faultpoints
from surefoot.checkpoint import importing
from surefoot.checkpoint.attempts import AttemptLog, SkipWindow, Source, StartsFrom
from surefoot.checkpoint.catalog import list_committed, read_manifest, read_scalars, verify
from surefoot.checkpoint.export import ModelFacts, export_checkpoint
from surefoot.checkpoint.hugging_face import HuggingFaceFolder
from surefoot.checkpoint.ids import CheckpointId, folder_name
from surefoot.checkpoint.importing import import_checkpoint
from surefoot.checkpoint.manifest import MANIFEST_FILE, checksum
from surefoot.checkpoint.placement import Placement, find_gap
from surefoot.checkpoint.safetensors_file import build_header, parse_header, read_header
from surefoot.checkpoint.staging_folder import StagingFolder
from surefoot.checkpoint.store import LocalStore
from surefoot.cli import main as cli
from surefoot.errors import AttemptTaken, CheckpointError, DamagedCheckpoint, NoUsableCheckpoint, UsageError
from surefoot.sdk.restore import find_candidates

CONFIG = {"model_type": "llama", "vocab_size": 6, "architectures": ["LlamaForCausalLM"]}
FACTS = {"hf_config": {"config": CONFIG, "tied_names": ["lm_head.weight"], "tokenizer": None}}
ALIASES = {"model.lm_head.weight": "model.model.embed.weight"}
NEWEST = CheckpointId(2, 40)


def values(*shape: int, dtype: str = "float32", seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 200, shape).astype(dtype)


@pytest.fixture
def whole() -> dict[str, np.ndarray]:
    return {
        "model.embed.weight": values(6, 8),
        "model.layers.2.weight": values(5, 7, seed=1),
        "model.layers.10.weight": values(9, 3, dtype="float16", seed=2),
        "model.norm.weight": values(8, seed=3),
        "model.steps": np.array(7, dtype="int64"),
        "model.nothing": values(0, 4),
    }


@pytest.fixture
def store(tmp_path: Path, whole: dict[str, np.ndarray]) -> LocalStore:
    """A job whose tensors lie on four ranks: whole, split by rows, columns, both, unevenly, with empty parts."""
    w = {f"model.{name}": array for name, array in whole.items()}
    embed, two, ten = "model.model.embed.weight", "model.model.layers.2.weight", "model.model.layers.10.weight"
    ranks = [
        [part_of(embed, w[embed], (slice(0, 3), slice(0, 5))),
         Part("model.model.norm.weight", whole["model.norm.weight"])],
        [part_of(embed, w[embed], (slice(0, 3), slice(5, 8))), part_of(two, w[two], (slice(0, 5), slice(0, 4)))],
        [part_of(embed, w[embed], (slice(3, 6), slice(0, 5))), part_of(two, w[two], (slice(0, 5), slice(4, 7))),
         part_of(ten, w[ten], (slice(0, 8), slice(0, 3))), Part("model.model.steps", whole["model.steps"])],
        [part_of(embed, w[embed], (slice(3, 6), slice(5, 8))), part_of(ten, w[ten], (slice(8, 9), slice(0, 3))),
         part_of(two, w[two], (slice(5, 5), slice(0, 7))), Part("model.model.nothing", whole["model.nothing"])],
    ]  # fmt: skip
    for rank, parts in enumerate(ranks):
        parts.append(Part(f"optimizer.exp_avg.w{rank}", values(11, seed=9)))
    commit_model(tmp_path / "storage" / "demo", NEWEST, ranks, aliases=ALIASES, scalars=FACTS)
    return LocalStore(tmp_path / "storage" / "demo")


def assert_exported(folder: Path, whole: dict[str, np.ndarray]) -> None:
    found = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    assert found.keys() == whole.keys()
    for name, array in whole.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape), name
        assert np.array_equal(found[name], array), name


def test_parts_of_sharded_tensors_come_together_and_tied_ones_are_written_once(
    store: LocalStore, whole: dict[str, np.ndarray], tmp_path: Path
) -> None:
    exported = export_checkpoint(store, NEWEST, tmp_path / "new" / "out")
    assert_exported(exported.folder, whole)
    assert exported.files == ("config.json", "model.safetensors")
    assert exported.num_tensors == len(whole)
    assert exported.num_bytes == sum(array.nbytes for array in whole.values())
    assert json.loads((exported.folder / "config.json").read_text()) == CONFIG | {"dtype": "float32"}
    assert "--tokenizer" in exported.note


def test_what_transformers_does_not_tie_again_is_written_under_each_name(tmp_path: Path) -> None:
    embed = values(6, 8)
    facts = {"hf_config": {"config": CONFIG, "tied_names": [], "tokenizer": None}}
    commit_model(tmp_path / "j", NEWEST, [[Part("model.model.embed.weight", embed)]], aliases=ALIASES, scalars=facts)
    folder = export_checkpoint(LocalStore(tmp_path / "j"), NEWEST, tmp_path / "out").folder
    assert_exported(folder, {"model.embed.weight": embed, "lm_head.weight": embed})


def test_files_hold_at_most_the_asked_for_bytes_and_the_index_names_them(
    store: LocalStore, whole: dict[str, np.ndarray], tmp_path: Path
) -> None:
    folder = export_checkpoint(store, NEWEST, tmp_path / "out", max_file_bytes=200).folder
    assert_exported(folder, whole)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert sorted(set(index["weight_map"].values())) == files
    assert files == [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in whole.values())
    for file in files:
        tensors = load_file(folder / file)
        assert len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= 200
        assert all(index["weight_map"][name] == file for name in tensors)
    assert HuggingFaceFolder(folder, "init_from").tensors.keys() == whole.keys()
    layers = [name for name in index["weight_map"] if "layers" in name]
    assert layers == ["model.layers.2.weight", "model.layers.10.weight"]


def test_compiled_models_and_unknown_kinds_of_floats_are_exported_as_they_are(tmp_path: Path) -> None:
    bf16 = values(4, 4, dtype="float16")
    f8 = values(3, dtype="uint8")
    parts = [Part("model._orig_mod.a", bf16, dtype="BF16"), Part("model._orig_mod.b", f8, dtype="F8_E4M3")]
    commit_model(tmp_path / "j", NEWEST, [parts], scalars=FACTS)
    folder = export_checkpoint(LocalStore(tmp_path / "j"), NEWEST, tmp_path / "out").folder
    places = HuggingFaceFolder(folder, "x").tensors
    assert {name: stored.place.dtype for name, stored in places.items()} == {"a": "BF16", "b": "F8_E4M3"}
    assert bytes(places["a"].read_rows(0, 4)) == bf16.tobytes()
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("file", ["rank-00002.safetensors", "rank-00000.json", MANIFEST_FILE])
@pytest.mark.parametrize("seed", range(4))
def test_c8_one_wrong_byte_anywhere_exports_and_imports_nothing(
    store: LocalStore, tmp_path: Path, file: str, seed: int
) -> None:
    """Case C8: whatever byte of whatever file it is, also of tensors that are not exported and of the header."""
    path = store.root / folder_name(NEWEST) / file
    data = bytearray(path.read_bytes())
    draw = random.Random(f"{file}{seed}")
    data[draw.randrange(len(data))] ^= draw.randrange(1, 256)
    path.write_bytes(data)
    with pytest.raises(DamagedCheckpoint) as caught:
        export_checkpoint(store, NEWEST, tmp_path / "target" / "out")
    assert caught.value.path == str(path)
    assert list((tmp_path / "target").glob("*")) == []
    for copy in (False, True):
        target = LocalStore(tmp_path / "storage" / f"other-{copy}".lower())
        with pytest.raises(DamagedCheckpoint):
            import_checkpoint(store, NEWEST, target, copy=copy)
        assert target.list("") == []


def test_a_shard_that_is_missing_or_cut_short_is_damage(store: LocalStore, tmp_path: Path) -> None:
    path = store.root / folder_name(NEWEST) / "rank-00003.safetensors"
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(DamagedCheckpoint, match="bytes instead of"):
        export_checkpoint(store, NEWEST, tmp_path / "out")
    path.unlink()
    with pytest.raises(DamagedCheckpoint, match="is missing"):
        export_checkpoint(store, NEWEST, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_tensor_whose_parts_are_not_all_there_is_not_exported(tmp_path: Path) -> None:
    half = part_of("model.w", values(4, 4), (slice(0, 2), slice(0, 4)))
    commit_model(tmp_path / "j", NEWEST, [[half]], scalars=FACTS)
    with pytest.raises(CheckpointError, match="8 of 16 items"):
        export_checkpoint(LocalStore(tmp_path / "j"), NEWEST, tmp_path / "out")


def test_what_is_there_is_never_overwritten(store: LocalStore, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    export_checkpoint(store, NEWEST, tmp_path / "out")
    before = (tmp_path / "out" / "model.safetensors").stat().st_ino
    (tmp_path / "file").write_text("mine")
    for target in (tmp_path / "out", tmp_path / "file"):
        with pytest.raises(UsageError, match="TARGET"):
            export_checkpoint(store, NEWEST, target)
    assert (tmp_path / "out" / "model.safetensors").stat().st_ino == before


def test_without_a_config_of_its_own_one_is_asked_for(tmp_path: Path) -> None:
    commit_model(tmp_path / "j", NEWEST, [[Part("model.w", values(2))]], scalars={"hf_config": None})
    store = LocalStore(tmp_path / "j")
    with pytest.raises(UsageError, match=r"--config.*holds no model config"):
        export_checkpoint(store, NEWEST, tmp_path / "out")
    folder = export_checkpoint(store, NEWEST, tmp_path / "out", config={"model_type": "gpt2"}).folder
    assert json.loads((folder / "config.json").read_text()) == {"model_type": "gpt2", "dtype": "float32"}
    commit(tmp_path / "k", NEWEST)
    with pytest.raises(CheckpointError):
        export_checkpoint(LocalStore(tmp_path / "k"), NEWEST, tmp_path / "k-out", config=CONFIG)


def test_the_jobs_tokenizer_comes_along_while_it_is_what_it_was(tmp_path: Path) -> None:
    path = tmp_path / "cache" / "tokenizer.json"
    path.parent.mkdir()
    path.write_text('{"model": {"type": "BPE"}}')
    known = {"path": str(path), "xxh3_128": checksum(path.read_bytes())}
    facts = {"hf_config": {"config": CONFIG, "tied_names": [], "tokenizer": known}}
    commit_model(tmp_path / "j", NEWEST, [[Part("model.w", values(2))]], scalars=facts)
    store = LocalStore(tmp_path / "j")
    exported = export_checkpoint(store, NEWEST, tmp_path / "a")
    assert (tmp_path / "a" / "tokenizer.json").read_text() == path.read_text()
    assert json.loads((tmp_path / "a" / "tokenizer_config.json").read_text())["tokenizer_class"]
    assert exported.note == ""
    path.write_text('{"model": {"type": "other"}}')
    assert "has changed" in export_checkpoint(store, NEWEST, tmp_path / "b").note
    given = export_checkpoint(store, NEWEST, tmp_path / "c", tokenizer=path.parent)
    assert (given.note, (tmp_path / "c" / "tokenizer.json").read_text()) == ("", path.read_text())
    path.unlink()
    assert "is not on this machine" in export_checkpoint(store, NEWEST, tmp_path / "d").note
    assert not (tmp_path / "d" / "tokenizer.json").exists()
    (tmp_path / "text").write_text("no tokenizer")
    for wrong in (tmp_path / "nowhere", tmp_path / "text", tmp_path):
        with pytest.raises(UsageError, match="--tokenizer"):
            export_checkpoint(store, NEWEST, tmp_path / "e", tokenizer=wrong)


def test_a_full_disk_leaves_nothing(store: LocalStore, tmp_path: Path) -> None:
    faultpoints.plan("export.shard_written=enospc@3")
    try:
        with pytest.raises(OSError, match="No space left"):
            export_checkpoint(store, NEWEST, tmp_path / "target" / "out")
    finally:
        faultpoints.plan("")
    assert list((tmp_path / "target").iterdir()) == []


def killed(fault: str, work: object) -> bool:
    """Run `work` in a forked process that a fault point kills; False when it ended before."""
    pid = os.fork()
    if pid == 0:
        try:
            faultpoints.plan(fault)
            work()  # type: ignore[operator]
        finally:
            os._exit(0)
    _, status = os.waitpid(pid, 0)
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


@pytest.mark.parametrize("fault", ["export.shard_written=kill@2", "export.written=kill"])
def test_an_export_that_is_killed_shows_nothing_and_the_next_one_tidies_up(
    store: LocalStore, whole: dict[str, np.ndarray], tmp_path: Path, fault: str
) -> None:
    target = tmp_path / "target" / "out"
    assert killed(fault, lambda: export_checkpoint(store, NEWEST, target))
    assert not target.exists()
    assert len(list(target.parent.iterdir())) == 1
    export_checkpoint(store, NEWEST, target)
    assert_exported(target, whole)
    assert list(target.parent.iterdir()) == [target]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_placement_puts_every_byte_where_it_belongs(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), max_size=4)))
    cuts = [sorted({0, n, *data.draw(st.lists(st.integers(0, n), max_size=2))}) for n in shape]
    whole = np.arange(int(np.prod(shape)), dtype="int16").reshape(shape)
    boxes: list[tuple[slice, ...]] = [()]
    for edges in cuts:
        boxes = [(*box, slice(a, b)) for box in boxes for a, b in pairwise(edges)]
    built = bytearray(whole.nbytes)
    for box in boxes:
        part = whole[box]
        offset = [s.start for s in box]
        content = part.tobytes()
        middle = data.draw(st.integers(0, len(content)))
        placement = Placement(part.shape, shape, offset, 2)
        for start, stop in ((0, middle), (middle, len(content))):
            for piece in placement.pieces(start, stop):
                built[piece.at : piece.at + piece.stop - piece.start] = content[piece.start : piece.stop]
    assert bytes(built) == whole.tobytes()
    parts = [(tuple(s.start for s in box), whole[box].shape) for box in boxes]
    assert find_gap(shape, parts) is None
    if len(parts) > 1:
        assert find_gap(shape, parts[1:]) is not None
        assert find_gap(shape, [parts[0], *parts]) is not None


def test_gaps_overlaps_and_strays_are_named() -> None:
    assert find_gap((4, 4), [((0, 0), (2, 4)), ((2, 0), (2, 4))]) is None
    assert "8 of 16" in str(find_gap((4, 4), [((0, 0), (2, 4))]))
    assert "overlap" in str(find_gap((4, 4), [((0, 0), (2, 4)), ((0, 0), (4, 2)), ((2, 2), (2, 2))]))
    assert "does not lie" in str(find_gap((4, 4), [((3, 0), (2, 4))]))
    assert "does not lie" in str(find_gap((4, 4), [((0,), (4,))]))
    assert find_gap((0, 3), []) is None
    assert find_gap((), [((), ())]) is None


def test_our_headers_are_read_by_safetensors_and_theirs_by_us(tmp_path: Path) -> None:
    arrays = {"b": values(3, 2, dtype="float16"), "a": values(2), "n": np.array(5, dtype="int64")}
    save_file(arrays, tmp_path / "theirs")
    with (tmp_path / "theirs").open("rb", buffering=0) as file:
        places = parse_header(read_header(file), (tmp_path / "theirs").stat().st_size)
    content = (tmp_path / "theirs").read_bytes()
    for name, place in places.items():
        assert content[place.start : place.start + place.num_bytes] == arrays[name].tobytes()
    header, ours = build_header({name: (place.dtype, place.shape) for name, place in places.items()})
    data = bytearray(header) + bytearray(sum(place.num_bytes for place in ours.values()))
    for name, place in ours.items():
        data[place.start : place.start + place.num_bytes] = arrays[name].tobytes()
        assert place.start % arrays[name].itemsize == 0
    (tmp_path / "ours").write_bytes(data)
    assert all(np.array_equal(array, arrays[name]) for name, array in load_file(tmp_path / "ours").items())


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x05",
        (10**12).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (2).to_bytes(8, "little") + b"{}" + b"more",
        (60).to_bytes(8, "little") + b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'.ljust(60) + b"1234",
        (60).to_bytes(8, "little") + b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}'.ljust(60) + bytes(12),
        (60).to_bytes(8, "little") + b'{"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}}'.ljust(60) + bytes(8),
        (60).to_bytes(8, "little") + b'{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}'.ljust(60) + bytes(8),
        (60).to_bytes(8, "little") + b'{"a":{"dtype":"F32"}}'.ljust(60),
    ],
)
def test_files_that_are_not_safetensors_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(UsageError, match=r"init_from.*model\.safetensors"):
        HuggingFaceFolder(tmp_path, "init_from")


def test_what_is_not_a_hugging_face_folder_is_refused_with_the_reason(tmp_path: Path, store: LocalStore) -> None:
    def refused(folder: Path) -> str:
        with pytest.raises(UsageError) as caught:
            HuggingFaceFolder(folder, "init_from")
        assert caught.value.key == "init_from"
        assert "allowed: a folder with config.json" in caught.value.problem
        return caught.value.problem

    assert "is not a folder" in refused(tmp_path / "nowhere")
    folder = tmp_path / "folder"
    folder.mkdir()
    assert "has no config.json" in refused(folder)
    (folder / "config.json").write_text("{")
    assert "is not JSON" in refused(folder)
    (folder / "config.json").write_text("{}")
    assert "holds neither" in refused(folder)
    (folder / "pytorch_model.bin").write_bytes(b"never read")
    assert "a pickle can run code" in refused(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../elsewhere"}}))
    assert "no weight_map" in refused(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "one", "b": "two"}}))
    save_file({"a": values(2)}, folder / "one")
    assert "two is missing" in refused(folder)
    save_file({"a": values(2)}, folder / "two")
    assert "holds a once more" in refused(folder)
    (store.root / "config.json").write_text("{}")
    (store.root / "attempts").mkdir()
    assert "is Surefoot's own" in refused(store.root)


def began(store: LocalStore) -> None:
    log = AttemptLog(store)
    common = {"world_size": 4, "host": "box", "started_at": datetime(2026, 12, 1, tzinfo=UTC)}
    log.claim(after=0, starts_from=StartsFrom(attempt=0, step=0, source=Source.SEED), cause="first", **common)
    log.claim(
        after=1, starts_from=StartsFrom(attempt=1, step=20, source=Source.COMMITTED), cause="rolled back",
        lr_factor=0.5, lr_hold_steps=10, lr_rewarm_steps=20, lr_from_step=20, command=7,
        skip_windows=(SkipWindow(start=21, stop=25),), **common,
    )  # fmt: skip


@pytest.mark.parametrize("copy", [False, True], ids=["link", "copy"])
def test_an_imported_checkpoint_is_the_start_of_the_new_job(store: LocalStore, tmp_path: Path, copy: bool) -> None:
    began(LocalStore(tmp_path / "records"))  # a claim beside the checkpoint would be of attempt 3
    shutil.copytree(tmp_path / "records" / "attempts", store.root / "attempts")
    target = LocalStore(tmp_path / "elsewhere" / "new-job")
    imported = import_checkpoint(store, NEWEST, target, copy=copy)
    start = CheckpointId(1, 40)
    assert imported.folder == target.root / folder_name(start)
    assert (imported.step, imported.linked, imported.note) == (40, not copy, "")
    assert list_committed(target) == [start]
    verify(target, start)
    manifest = read_manifest(target, start, "new-job")
    assert manifest.plan_digest == read_manifest(store, NEWEST).plan_digest
    assert read_scalars(target, start) == read_scalars(store, NEWEST)
    shard = folder_name(NEWEST) + "/rank-00001.safetensors"
    ours = imported.folder / "rank-00001.safetensors"
    assert ours.samefile(store.root / shard) is not copy
    assert ours.read_bytes() == (store.root / shard).read_bytes()
    (record,) = AttemptLog(target).read_all().values()
    assert (record.attempt, record.starts_from.source, record.world_size) == (1, Source.SEED, 4)
    assert (record.lr_factor, record.lr_hold_steps, record.lr_from_step, record.command) == (0.5, 10, 20, 0)
    assert record.skip_windows == (SkipWindow(start=21, stop=25),)
    assert str(store.root / folder_name(NEWEST)) in record.cause


def test_only_a_job_that_was_never_begun_takes_an_import(store: LocalStore, tmp_path: Path) -> None:
    begun = LocalStore(tmp_path / "storage" / "begun")
    began(begun)
    with pytest.raises(UsageError, match="has attempts already"):
        import_checkpoint(store, NEWEST, begun, copy=False)
    other = LocalStore(tmp_path / "storage" / "other")
    commit(other.root, CheckpointId(1, 3))
    with pytest.raises(UsageError, match="has checkpoints already"):
        import_checkpoint(store, NEWEST, other, copy=False)
    with pytest.raises(UsageError, match="not the name of a job"):
        import_checkpoint(store, NEWEST, LocalStore(tmp_path / "Not A Job"), copy=False)
    with pytest.raises(UsageError, match="the folder of the checkpoint itself"):
        import_checkpoint(store, NEWEST, store, copy=False)
    verify(store, NEWEST)
    assert not (tmp_path / "Not A Job").exists()


def test_a_checkpoint_is_not_imported_over_itself(tmp_path: Path) -> None:
    """Its folder would be cleared first, as what an import that was killed has left."""
    lone, same = LocalStore(tmp_path / "lone"), CheckpointId(1, 3)
    commit(lone.root, same)
    with pytest.raises(UsageError, match="the folder of the checkpoint itself"):
        import_checkpoint(lone, same, LocalStore(lone.root), copy=False)
    verify(lone, same)


def test_an_import_into_a_job_that_begins_at_this_moment_leaves_it_nothing(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lay there as a checkpoint of attempt 1 would be on the lineage of the attempt that somebody began."""
    target = LocalStore(tmp_path / "new-job")
    monkeypatch.setattr(importing, "reach", lambda point: began(target) if point == "import.copied" else None)
    with pytest.raises(AttemptTaken):
        import_checkpoint(store, NEWEST, target, copy=False)
    assert sorted(path.name for path in target.root.iterdir()) == ["attempts", "reserve.bin"]
    assert list(AttemptLog(target).read_all()) == [1, 2]


def test_a_checkpoint_without_its_attempt_record_comes_with_a_note(store: LocalStore, tmp_path: Path) -> None:
    target = LocalStore(tmp_path / "new-job")
    assert "record of attempt 2 is not beside" in import_checkpoint(store, NEWEST, target, copy=False).note
    assert AttemptLog(target).read_all()[1].skip_windows == ()


@pytest.mark.parametrize(
    "fault",
    [
        "import.part_written=kill@2",
        "import.copied=kill",
        "store.write.renamed=kill@6",  # four parts, the manifest, the record
        "import.claimed=kill",
        "export.written=kill",
    ],
)
def test_an_import_that_is_killed_begins_nothing_silently_and_can_be_done_again(
    store: LocalStore, tmp_path: Path, fault: str
) -> None:
    """No checkpoint counts yet; when the attempt is claimed already, its record says that there was progress."""
    target = LocalStore(tmp_path / "new-job")
    assert killed(fault, lambda: import_checkpoint(store, NEWEST, target, copy=False))
    assert list_committed(target) == []
    assert all(record.is_import for record in AttemptLog(target).read_all().values())
    import_checkpoint(store, NEWEST, target, copy=False)
    assert_imported(target)
    verify(store, NEWEST)


def assert_imported(target: LocalStore, step: int = 40) -> None:
    assert list_committed(target) == [CheckpointId(1, step)]
    verify(target, CheckpointId(1, step))
    (record,) = AttemptLog(target).read_all().values()
    assert (record.attempt, record.is_import) == (1, True)
    assert f"/{folder_name(CheckpointId(2, step))} of job" in record.cause
    assert not list(target.root.glob(".tmp-*"))


def test_what_a_killed_import_claimed_is_finished_by_the_same_import_only(store: LocalStore, tmp_path: Path) -> None:
    target = LocalStore(tmp_path / "new-job")
    assert killed("import.claimed=kill", lambda: import_checkpoint(store, NEWEST, target, copy=False))
    commit(store.root, CheckpointId(2, 60))
    with pytest.raises(UsageError, match="has attempts already"):
        import_checkpoint(store, CheckpointId(2, 60), target, copy=False)
    assert list_committed(target) == []


@pytest.mark.parametrize("same", [True, False], ids=["one-checkpoint", "different-steps"])
@pytest.mark.parametrize("locks", [True, False], ids=["locks", "no-locks"])
def test_of_three_imports_into_one_job_at_once_exactly_one_wins(
    store: LocalStore, tmp_path: Path, same: bool, locks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real processes. Without locks (as on NFS) the claim alone decides."""
    ids = [NEWEST] * 3
    if not same:
        ids = [NEWEST, CheckpointId(2, 50), CheckpointId(2, 60)]
        for checkpoint in ids[1:]:
            commit(store.root, checkpoint)
    if not locks:
        monkeypatch.setattr(fcntl, "flock", no_locks)
    for round_ in range(3):
        target = LocalStore(tmp_path / f"new-{round_}")
        ready, go = os.pipe()
        pids = [start_import(store, checkpoint, target, ready, go) for checkpoint in ids]
        os.close(go)  # the moment at which all begin
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        os.close(ready)
        assert sorted(codes) == [0, 2, 2]
        assert_imported(target, ids[codes.index(0)].step)


def no_locks(fd: int, operation: int) -> None:
    raise OSError(errno.EBADF, os.strerror(errno.EBADF))


def start_import(store: LocalStore, checkpoint: CheckpointId, target: LocalStore, ready: int, go: int) -> int:
    """Import in a process that begins when nobody has `go` open any more; return its pid."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(go)
            os.read(ready, 1)
            import_checkpoint(store, checkpoint, target, copy=True)
            code = 0
        except (UsageError, AttemptTaken):
            code = 2
        finally:
            os._exit(code)
    return pid


@pytest.mark.parametrize("place", ["", "quarantine/", "trash/"])
@pytest.mark.parametrize("content", ["manifest.json", "mine.txt", ""])
def test_a_step_folder_that_is_there_is_neither_deleted_nor_written_over(
    store: LocalStore, tmp_path: Path, place: str, content: str
) -> None:
    target = LocalStore(tmp_path / "new-job")
    folder = target.root / place / folder_name(CheckpointId(1, 40))
    folder.mkdir(parents=True)
    if content:
        (folder / content).write_text("mine")
    with pytest.raises(UsageError, match="has checkpoints already"):
        import_checkpoint(store, NEWEST, target, copy=False)
    assert [path.name for path in folder.iterdir()] == [content] * bool(content)
    assert AttemptLog(target).read_all() == {}


def test_a_name_whose_last_job_left_snapshots_in_memory_is_refused(store: LocalStore, tmp_path: Path) -> None:
    """They would be restored instead of the checkpoint: attempt 1 has their higher step."""
    storage, staging_dir = tmp_path / "new-storage", tmp_path / "shm"
    storage.mkdir()
    (tmp_path / "link").symlink_to(storage)
    folder = StagingFolder.create(staging_dir, "new-job", storage)
    target = LocalStore(storage / "new-job")
    (buffer,) = folder.create_buffers(0, 1, 4096)
    spellings = (target.root, tmp_path / "link" / "new-job", storage / ".." / storage.name / "new-job")
    for root in spellings:
        with pytest.raises(UsageError) as caught:
            import_checkpoint(store, NEWEST, LocalStore(root), copy=False, staging_dir=staging_dir)
        assert f"rm -r {folder.path}" in caught.value.problem
        assert target.list("") == []
    import_checkpoint(store, NEWEST, LocalStore(storage / "other"), copy=False, staging_dir=staging_dir)
    buffer.path.unlink()
    import_checkpoint(store, NEWEST, target, copy=False, staging_dir=staging_dir)
    assert_imported(target)


def test_a_target_that_is_a_file_or_lies_in_one_is_refused(store: LocalStore, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for root in (tmp_path / "file", tmp_path / "file" / "job"):
        with pytest.raises(UsageError, match="is not a folder"):
            import_checkpoint(store, NEWEST, LocalStore(root), copy=False)
    with pytest.raises(UsageError, match="not the name of a job"):
        import_checkpoint(store, NEWEST, LocalStore(Path()), copy=False)


def run_import(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr(sys, "argv", ["surefoot", "checkpoints", "import", *map(str, words)])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return int(caught.value.code or 0)


def test_the_command_refuses_empty_words_and_looks_into_the_staging_dir(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    source = store.root / folder_name(NEWEST)
    for words in (("", "new"), (source, ""), (source, " ")):
        assert run_import(monkeypatch, *words) == 2
        assert "is empty; allowed" in capsys.readouterr().err
    folder = StagingFolder.create(tmp_path / "shm", "new", tmp_path / "s")
    folder.create_buffers(0, 1, 4096)
    assert run_import(monkeypatch, source, "s/new", "--staging-dir", tmp_path / "shm") == 2
    assert str(folder.path) in capsys.readouterr().err.replace("\n", "")
    assert run_import(monkeypatch, source, "s/new") == 0
    assert_imported(LocalStore(tmp_path / "s" / "new"))


class LoneRank(NamedTuple):
    """As much of a `Host` as `find_candidates` asks."""

    store: LocalStore
    folder: StagingFolder

    @property
    def group(self) -> LoneRank:
        return self

    def gather_json(self, value: object) -> list[object]:
        return [value]


def test_an_import_that_was_killed_after_its_claim_does_not_start_from_the_seed(
    store: LocalStore, tmp_path: Path
) -> None:
    target = LocalStore(tmp_path / "new-job")
    host: Any = LoneRank(target, StagingFolder(tmp_path / "shm"))
    assert find_candidates(host, {}) == []
    assert killed("import.claimed=kill", lambda: import_checkpoint(store, NEWEST, target, copy=False))
    with pytest.raises(NoUsableCheckpoint, match="had progress"):
        find_candidates(host, AttemptLog(target).read_all())
    import_checkpoint(store, NEWEST, target, copy=False)
    (candidate,) = find_candidates(host, AttemptLog(target).read_all())
    assert candidate.id == CheckpointId(1, 40)


def test_facts_of_other_versions_count_as_absent() -> None:
    assert ModelFacts.parse(None) is None
    assert ModelFacts.parse({"model_type": "llama"}) is None
    assert ModelFacts.parse({"config": CONFIG}) == ModelFacts(CONFIG)
