import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from surefoot.errors import UsageError
from surefoot.sdk.data.tokens import TokenFile
from surefoot.spec import RecipeSpec
from surefoot_worker.recipe.corpus import Piece, find_source_files, split
from surefoot_worker.recipe.data import PreparedData, prepare

WORDS = ["rank", "shard", "loss", "é", "step", "日本", "gather", "(", "attempt", "0x"]


def text_of(length: int, seed: int = 1) -> str:
    """Lines of words and numbers, about that many characters, the same for the same seed."""
    state, words = seed, []
    while length > 0:
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        words.append(f"{WORDS[(state >> 40) % len(WORDS)]}{(state >> 33) % 128:x}")
        words.append("\n" if (state >> 50) % 8 == 0 else " ")
        length -= len(words[-2]) + 1
    return "".join(words)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    for number in range(40):
        path = folder / f"part{number % 4}" / f"file{number}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text_of(300 if number % 10 == 0 else 3000, seed=number), encoding="utf-8")
    return folder


def spec_of(tmp_path: Path, data: Path | None, **changes: object) -> RecipeSpec:
    settings = {"model": {"vocab_size": 320}, "sequence_length": 32, "global_batch_size": 4} | changes
    return RecipeSpec.model_validate({"data": data, "cache_dir": tmp_path / "cache"} | settings)


def no_report(stage: str, detail: str, seconds: float) -> None:
    pass


def decode(prepared: PreparedData, path: Path) -> list[str]:
    """The documents in a token file."""
    tokens = TokenFile(path, 1)
    ids = [tokens[i]["input_ids"].item() for i in range(len(tokens))]
    tokenizer = Tokenizer.from_file(str(prepared.tokenizer_path))
    documents = tokenizer.decode(ids, skip_special_tokens=False).split("<|endoftext|>")
    assert documents.pop() == ""
    return documents


def test_every_document_is_in_training_or_validation_unchanged(tmp_path: Path, corpus: Path) -> None:
    stages = []
    prepared = prepare(spec_of(tmp_path, corpus), lambda *stage: stages.append(stage))
    training, validation = decode(prepared, prepared.train_path), decode(prepared, prepared.validation_path)
    expected = [p.read_text(encoding="utf-8") for p in corpus.rglob("*.md")]
    assert sorted(training + validation) == sorted(expected)
    assert 1 <= len(validation) <= 4
    assert prepared.vocab_size <= 320
    assert prepared.num_tokens == TokenFile(prepared.train_path, 1).num_tokens
    assert [stage for stage, _, _ in stages] == ["tokenizer", "tokens"]
    assert all(seconds > 0 for _, _, seconds in stages)


def test_a_warm_cache_is_used_as_it_is(tmp_path: Path, corpus: Path) -> None:
    first = prepare(spec_of(tmp_path, corpus), no_report)
    stages = []
    assert prepare(spec_of(tmp_path, corpus), lambda *stage: stages.append(stage)) == first
    assert prepare(spec_of(tmp_path, corpus, steps=7, sequence_length=16), no_report) == first
    assert stages == []


def test_preparing_again_gives_the_same_tokens(tmp_path: Path, corpus: Path) -> None:
    first = prepare(spec_of(tmp_path, corpus), no_report)
    second = prepare(spec_of(tmp_path, corpus, cache_dir=tmp_path / "other"), no_report)
    assert second.digest == first.digest
    for name in ("tokenizer_path", "train_path", "validation_path"):
        assert getattr(second, name).read_bytes() == getattr(first, name).read_bytes()


@pytest.mark.parametrize("change", ["edit", "add", "remove", "vocab_size"])
def test_a_change_makes_new_tokens(tmp_path: Path, corpus: Path, change: str) -> None:
    first = prepare(spec_of(tmp_path, corpus), no_report)
    spec = spec_of(tmp_path, corpus)
    path = corpus / "part1" / "file1.md"
    if change == "edit":
        status = path.stat()
        path.write_text("another text of another length " * 200, encoding="utf-8")
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    elif change == "add":
        (corpus / "new.txt").write_text("new " * 300, encoding="utf-8")
    elif change == "remove":
        path.unlink()
    else:
        spec = spec_of(tmp_path, corpus, model={"vocab_size": 310})
    second = prepare(spec, no_report)
    assert second.train_path != first.train_path
    assert second.digest != first.digest
    assert first.train_path.exists()


CACHED = ["tokenizer.json", "train.tokens", "validation.tokens", "prepared.json"]


@pytest.mark.parametrize(
    ("name", "damage"),
    # A tokenizer of the right name is not looked into at each start; loading it would tell.
    [(name, damage) for name in CACHED for damage in ("delete", "truncate")]
    + [(name, "garble") for name in CACHED[1:]],
)
def test_a_damaged_cache_is_made_again(tmp_path: Path, corpus: Path, name: str, damage: str) -> None:
    first = prepare(spec_of(tmp_path, corpus), no_report)
    path = first.train_path.with_name(name)
    whole = path.read_bytes()
    if damage == "delete":
        path.unlink()
    else:
        path.write_bytes(b"" if damage == "truncate" else b"[1]" + whole[3:])
    assert prepare(spec_of(tmp_path, corpus), no_report) == first
    assert path.read_bytes() == whole


PREPARE = """
import json, pathlib, sys
from surefoot.spec import RecipeSpec
from surefoot_worker.recipe.data import prepare
print("ready", flush=True)
sys.stdin.readline()
stages = []
prepared = prepare(RecipeSpec.model_validate_json(sys.argv[1]), lambda *stage: stages.append(stage[0]))
print(json.dumps([prepared.digest, stages]))
"""


def start(spec: RecipeSpec, fault: str = "") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PREPARE, spec.model_dump_json()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"SUREFOOT_FAULT": fault},
    )


@pytest.mark.parametrize(
    "fault", ["recipe.tokenizer_written=kill", "recipe.tokens_written=kill", "recipe.renamed=kill"]
)
def test_a_kill_in_the_middle_leaves_nothing_half(tmp_path: Path, corpus: Path, fault: str) -> None:
    spec = spec_of(tmp_path, corpus)
    with start(spec, fault) as killed:
        killed.communicate("\n")
    assert killed.returncode == -signal.SIGKILL
    stages = []
    prepared = prepare(spec, lambda *stage: stages.append(stage))
    assert bool(stages) == (fault != "recipe.renamed=kill")
    assert prepared.digest == prepare(spec_of(tmp_path, corpus, cache_dir=tmp_path / "other"), no_report).digest
    folder = prepared.train_path.parent
    assert sorted(p.name for p in spec.cache_dir.iterdir()) == sorted([folder.name, f"{folder.name}.lock"])


def test_of_many_ranks_one_prepares_and_the_others_wait(tmp_path: Path, corpus: Path) -> None:
    ranks = [start(spec_of(tmp_path, corpus)) for _ in range(3)]
    for rank in ranks:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "ready\n"
    for rank in ranks:
        assert rank.stdin is not None
        rank.stdin.write("\n")
        rank.stdin.flush()
    results = [json.loads(rank.communicate()[0]) for rank in ranks]
    assert len({digest for digest, _ in results}) == 1
    assert sorted(stages for _, stages in results) == [[], [], ["tokenizer", "tokens"]]


def test_one_file_of_any_name_gives_training_and_validation_text(tmp_path: Path) -> None:
    path = tmp_path / "book"
    path.write_text(text_of(60_000), encoding="utf-8")
    prepared = prepare(spec_of(tmp_path, path), no_report)
    [training], [validation] = decode(prepared, prepared.train_path), decode(prepared, prepared.validation_path)
    assert training + validation == path.read_text(encoding="utf-8")
    assert 100 < len(validation) < 2000
    assert training.endswith("\n")


def test_text_that_is_not_utf8_is_decoded_with_replacement(tmp_path: Path) -> None:
    path = tmp_path / "latin.txt"
    path.write_bytes("Übung macht den Meister. ".encode("latin-1") * 200)
    prepared = prepare(spec_of(tmp_path, path), no_report)
    assert decode(prepared, prepared.train_path)[0].startswith("\ufffdbung macht")


def test_long_files_are_read_in_chunks_that_join_to_the_whole(tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    text = "日本語\n" * 300_000 + "x" * 2_500_000
    path.write_text(text, encoding="utf-8")
    [file] = find_source_files(path)
    chunks = list(Piece(file, 0, file.num_bytes).chunks())
    assert "".join(chunks) == text
    assert max(map(len, chunks)) <= 2 * 2**20


def test_validation_is_about_one_percent_and_never_overlaps(corpus: Path) -> None:
    files = find_source_files(corpus)
    training, validation = split(files)
    total = sum(f.num_bytes for f in files)
    assert 0 < sum(p.stop - p.start for p in validation) <= 0.011 * total
    assert {p.file for p in training} & {p.file for p in validation} == set()
    assert sum(p.stop - p.start for p in training + validation) == total


def test_hidden_foreign_and_linked_things_are_left_out(tmp_path: Path) -> None:
    for name in ["a.txt", "b.PY", "c.bin", ".hidden.txt", ".git/d.txt", "node_modules/e.js", "f/g.rst", "h.md"]:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("" if name == "h.md" else name, encoding="utf-8")
    (tmp_path / "f" / "loop").symlink_to(tmp_path)
    (tmp_path / "link.txt").symlink_to(tmp_path / "c.bin")
    (tmp_path / "dead.txt").symlink_to(tmp_path / "nowhere")
    assert [f.name for f in find_source_files(tmp_path)] == ["a.txt", "b.PY", "f/g.rst", "link.txt"]


def make_nothing(path: Path) -> None:
    pass


def make_folder_without_text(path: Path) -> None:
    path.mkdir()
    (path / "image.png").write_bytes(b"png")


def make_empty_file(path: Path) -> None:
    path.touch()


def make_short_file(path: Path) -> None:
    path.write_text("too little\n" * 10, encoding="utf-8")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (make_nothing, "No such file"),
        (make_folder_without_text, "holds no text"),
        (make_empty_file, "holds no text"),
        (make_short_file, r"one global batch needs 4"),
        (os.mkfifo, "neither a folder nor a regular file"),
    ],
)
def test_bad_data_is_named(tmp_path: Path, make, message: str) -> None:
    make(tmp_path / "data")
    with pytest.raises(UsageError, match=message) as caught:
        prepare(spec_of(tmp_path, tmp_path / "data"), no_report)
    assert caught.value.key == "recipe.data"


def test_an_unusable_cache_folder_is_named(tmp_path: Path, corpus: Path) -> None:
    (tmp_path / "cache").write_text("in the way", encoding="utf-8")
    with pytest.raises(UsageError, match="cannot be used") as caught:
        prepare(spec_of(tmp_path, corpus), no_report)
    assert caught.value.key == "recipe.cache_dir"


@pytest.mark.slow  # `make demo` does it
def test_the_standard_library_is_the_default_and_warm_starts_are_quick(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, None, model={"vocab_size": 4096}, sequence_length=256, global_batch_size=16)
    prepared = prepare(spec, no_report)
    assert prepared.num_tokens > 2_000_000
    assert prepared.vocab_size == 4096
    seconds = []
    for _ in range(5):
        begin = time.perf_counter()
        assert prepare(spec, no_report) == prepared
        seconds.append(time.perf_counter() - begin)
    assert min(seconds) < 0.05


def folder_with_tokenizer(tmp_path: Path, corpus: Path, end: str, **files: object) -> Path:
    """A Hugging Face folder whose tokenizer ends texts with `end`."""
    made = Tokenizer.from_file(str(prepare(spec_of(tmp_path, corpus), no_report).tokenizer_path))
    content = made.to_str().replace("<|endoftext|>", end)
    folder = tmp_path / f"folder{len(list(tmp_path.iterdir()))}"
    folder.mkdir()
    (folder / "tokenizer.json").write_text(content)
    for name, value in ({"config": {}} | files).items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def test_a_given_tokenizer_is_used_with_the_token_that_ends_a_text(tmp_path: Path, corpus: Path) -> None:
    spec = spec_of(tmp_path, corpus)
    ways = [
        {"tokenizer_config": {"eos_token": "</s>"}},
        {"tokenizer_config": {"eos_token": {"content": "</s>", "special": True}}},
        {"config": {"eos_token_id": 0}},
        {"config": {"eos_token_id": [0, 5]}},
    ]
    for files in ways:
        folder = folder_with_tokenizer(tmp_path, corpus, "</s>", **files)
        stages = []
        prepared = prepare(spec, lambda *stage, to=stages: to.append(stage), folder)
        assert str(folder) in stages[0][1]
        assert prepared.tokenizer_path.read_text() == (folder / "tokenizer.json").read_text()
        assert (prepared.tokenizer_path.parent / "tokenizer_config.json").exists() == ("tokenizer_config" in files)
        tokens = TokenFile(prepared.train_path, 1)
        assert sum(tokens[i]["input_ids"].item() == 0 for i in range(len(tokens))) > 30
    assert prepare(spec, no_report, folder) == prepared
    assert prepare(spec, no_report) != prepared
    (folder / "tokenizer.json").write_text((folder / "tokenizer.json").read_text() + " ")
    assert prepare(spec, no_report, folder).train_path != prepared.train_path


def test_a_folder_without_tokenizer_leaves_it_to_the_recipe_and_a_missing_one_does_not(
    tmp_path: Path, corpus: Path
) -> None:
    (tmp_path / "bare").mkdir()
    own = prepare(spec_of(tmp_path, corpus), no_report)
    assert prepare(spec_of(tmp_path, corpus), no_report, tmp_path / "bare") == own
    with pytest.raises(UsageError, match=r"init_from: .*is not a folder"):
        prepare(spec_of(tmp_path, corpus), no_report, tmp_path / "gone")


def test_a_given_tokenizer_that_cannot_be_used_is_refused(tmp_path: Path, corpus: Path) -> None:
    folder = folder_with_tokenizer(tmp_path, corpus, "</s>")
    with pytest.raises(UsageError, match=r"init_from: .*tokenizer_config\.json needs an eos_token"):
        prepare(spec_of(tmp_path, corpus), no_report, folder)
    small = spec_of(tmp_path, corpus, model={"vocab_size": 300})
    with pytest.raises(UsageError, match=r"recipe\.model\.vocab_size: is 300"):
        prepare(small, no_report, folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(UsageError, match="not a tokenizer"):
        prepare(spec_of(tmp_path, corpus), no_report, folder)
