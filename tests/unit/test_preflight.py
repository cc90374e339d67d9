"""Bad input: each row is a broken spec and the key that the refusal must name. Nothing may be started or written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from surefoot import preflight
from surefoot.checkpoint.staging_folder import staging_folder_path
from surefoot.cli import main as cli
from surefoot.entrypoint import require_package
from surefoot.errors import EXIT_USAGE, StagingTooSmall, UsageError
from surefoot.spec import RecipeSpec, parse_spec

RECIPE = "-m surefoot_worker.recipe"


def good(**changes: Any) -> dict[str, Any]:
    return {"job": "j", "entrypoint": "train.py --lr 3e-4", "checkpoint": {"staging_dir": "staging"}} | changes


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current directory with the files that the rows speak of."""
    for folder in ("staging", "pkg", "empty", "text"):
        (tmp_path / folder).mkdir()
    sources = {
        "train.py": "import os, json\nimport sibling\nif True:\n    import surely_not_there\n",
        "sibling.py": "",
        "broken.py": "x = 1\ndef f(:\n",
        "nul.py": "x = '\0'\n",
        "needs.py": '"""Doc."""\n\nimport json\nimport surely_not_there.sub\n',
        "needs_from.py": "from surely_not_there import x\n",
        "own_path.py": "import sys\nsys.path.insert(0, 'elsewhere')\nimport surely_not_there\n",
        "optional.py": "try:\n    import surely_not_there\nexcept ImportError:\n    pass\nfrom . import x\n",
        "pkg/__init__.py": "raise RuntimeError('imported by the check')\n",
        "pkg/ok.py": "import json\n",
        "pkg/bad.py": "import surely_not_there\n",
        "text/a.txt": "text",
        "empty.txt": "",
        "file": "not a folder",
    }
    for name, source in sources.items():
        (tmp_path / name).write_text(source)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def recipe(**settings: Any) -> dict[str, Any]:
    return good(entrypoint=RECIPE, recipe=settings)


BAD_INPUT: list[tuple[dict[str, Any], str, str]] = [
    # spec
    (good(nproc=2), "nproc", "allowed here: job"),
    (good(nproc_per_node="two"), "nproc_per_node", "valid integer"),
    # entrypoint
    (good(entrypoint="nowhere.py"), "entrypoint", "no script 'nowhere.py'"),
    (good(entrypoint="python train.py"), "entrypoint", "without the interpreter"),
    (good(entrypoint="pkg"), "entrypoint", "no script 'pkg'"),
    (good(entrypoint="-c 'print(1)'"), "entrypoint", "starts with the option -c"),
    (good(entrypoint="train.py 'unclosed"), "entrypoint", "No closing quotation"),
    (good(entrypoint="   "), "entrypoint", "is empty"),
    (good(entrypoint="-m"), "entrypoint", "names no module"),
    (good(entrypoint="-m surely_not_there"), "entrypoint", "no module named 'surely_not_there'"),
    (good(entrypoint="-m pkg.nothing"), "entrypoint", "no module named 'pkg.nothing'"),
    (good(entrypoint="-m pkg"), "entrypoint", "no module named 'pkg.__main__'"),
    (good(entrypoint="-m train.py"), "entrypoint", "no module named 'train.py'"),
    (good(entrypoint="-m pkg.bad"), "entrypoint", "line 1: imports 'surely_not_there'"),
    (good(entrypoint="broken.py"), "entrypoint", "broken.py, line 2"),
    (good(entrypoint="nul.py"), "entrypoint", "nul.py"),
    (good(entrypoint="needs.py"), "entrypoint", "line 4: imports 'surely_not_there'"),
    (good(entrypoint="needs_from.py"), "entrypoint", "line 1: imports 'surely_not_there'"),
    # recipe
    (good(recipe={"steps": 5}), "recipe", "only the built-in recipe"),
    (recipe(data="nowhere"), "recipe.data", "does not exist"),
    (recipe(data="empty"), "recipe.data", "holds no file"),
    (recipe(data="empty.txt"), "recipe.data", "is empty"),
    (recipe(data="/dev/null"), "recipe.data", "not a regular file"),
    (recipe(cache_dir="file/cache"), "recipe.cache_dir", "is not a directory"),
    (recipe(global_batch_size=1) | {"nproc_per_node": 2}, "recipe.global_batch_size", "2 and more"),
    # places
    (good(storage="/proc/surefoot"), "storage", "cannot be written"),
    (good(storage="file"), "storage", "is not a directory"),
    (good(storage="~/checkpoints"), "storage", "~ is not expanded"),
    (good(storage="a\0b"), "storage", "not a plain path"),
    (good(run_dir="/proc/surefoot"), "run_dir", "cannot be written"),
    (good(run_dir="file/run"), "run_dir", "is not a directory"),
    # environment
    (good(env={"RANK": "3"}), "env.RANK", "set by the launcher"),
    (good(env={"a b": "3"}), "env.a b", "variable name"),
    (good(env={"A": "\0"}), "env.A", "NUL"),
    # checkpoint
    (good(checkpoint={"staging_dir": "nowhere"}), "checkpoint.staging_dir", "does not exist"),
    (good(checkpoint={"staging_dir": "file"}), "checkpoint.staging_dir", "is not a directory"),
    (good(checkpoint={"staging_dir": "/proc"}), "checkpoint.staging_dir", "cannot be written"),
    (good(checkpoint={"staging_dir": "staging", "num_buffers": 2}), "checkpoint.num_buffers", "need 3 and more"),
    (
        recipe(model={"hidden_size": 2**16, "num_hidden_layers": 200, "intermediate_size": 2**18}),
        "checkpoint.staging_dir",
        "the snapshot buffers need",
    ),
]


def tree(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


@pytest.mark.parametrize("command", [["run"], ["spec", "check"]], ids=["run", "check"])
@pytest.mark.parametrize(("data", "key", "told"), BAD_INPUT, ids=[f"{row[1]}-{row[2]}" for row in BAD_INPUT])
def test_bad_input(
    data: dict[str, Any],
    key: str,
    told: str,
    command: list[str],
    workplace: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("spec.yaml").write_text(yaml.safe_dump(data))
    before = tree(workplace)
    monkeypatch.setattr(sys, "argv", ["surefoot", *command, "spec.yaml"])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == EXIT_USAGE
    message = capsys.readouterr().err
    assert message.startswith(f"surefoot: error: {key}: ")
    assert told in message
    assert message.count("\n") == 1, "one line, no traceback"
    assert tree(workplace) == before, "nothing was written"


@pytest.mark.parametrize(
    "data",
    [
        good(),
        good(entrypoint="own_path.py"),
        good(entrypoint="optional.py"),
        good(entrypoint="-m pkg.ok"),
        good(entrypoint="-m json.tool"),
        good(entrypoint="-m sibling"),
        good(entrypoint="needs.py", env={"PYTHONPATH": "/nowhere:more"}),
        good(checkpoint={"staging_dir": "staging", "num_buffers": 2, "snapshot_every_steps": 0}),
    ],
    ids=lambda data: data["entrypoint"],
)
def test_good_input_is_not_refused_and_nothing_is_written(data: dict[str, Any], workplace: Path) -> None:
    (workplace / "more" / "surely_not_there").mkdir(parents=True)
    before = tree(workplace)
    path = sys.path[:]
    spec = parse_spec(data)
    assert preflight.check(spec) == spec
    assert tree(workplace) == before
    assert sys.path == path
    assert "pkg" not in sys.modules


def test_the_recipe_without_its_section_gets_the_defaults(workplace: Path) -> None:
    spec = preflight.check(parse_spec(good(entrypoint=RECIPE)))
    assert spec.recipe == RecipeSpec()


@pytest.mark.parametrize("data", ["text", "text/a.txt"])
def test_data_may_be_a_folder_or_a_file(data: str) -> None:
    preflight.check(parse_spec(recipe(data=data)))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_folder_without_write_permission(workplace: Path) -> None:
    (workplace / "empty").chmod(0o555)
    with pytest.raises(UsageError, match=r"storage: .*Permission denied"):
        preflight.check(parse_spec(good(storage="empty/deep/er")))


def test_staging_counts_ranks_and_buffers_and_names_the_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = parse_spec(recipe() | {"nproc_per_node": 2})
    assert spec.recipe is not None
    needed = preflight.staging_bytes_needed(spec)
    state_bytes = spec.recipe.model.num_parameters() * 12
    assert 3 * state_bytes < needed < 3 * state_bytes * 1.1 + 3 * 2 * 2**21
    monkeypatch.setattr(preflight, "free_bytes", lambda path: needed - 1)
    with pytest.raises(StagingTooSmall) as caught:
        preflight.check(spec)
    assert (caught.value.needed_bytes, caught.value.available_bytes) == (needed, needed - 1)
    assert "num_buffers" in str(caught.value)


def test_buffers_of_the_same_job_are_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = parse_spec(recipe())
    needed = preflight.staging_bytes_needed(spec)
    folder = staging_folder_path(spec.checkpoint.staging_dir, spec.job, spec.storage.absolute())
    folder.mkdir(parents=True)
    monkeypatch.setattr(preflight, "free_bytes", lambda path: needed - 2**20)
    with pytest.raises(StagingTooSmall):
        preflight.check(spec)
    (folder / "rank-00000-buffer-0.stage").write_bytes(bytes(2**20))
    preflight.check(spec)


def test_missing_packages_are_named() -> None:
    with pytest.raises(UsageError, match=r"entrypoint: needs .* surely_not_there, .*: pip install it"):
        require_package("surely_not_there", "pip install it")


def test_bad_input_is_answered_without_torch(workplace: Path) -> None:
    Path("spec.yaml").write_text(yaml.safe_dump(good(entrypoint="nowhere.py")))
    code = (
        "import sys\nfrom surefoot.cli.main import main\n"
        "sys.argv = ['surefoot', 'run', 'spec.yaml']\n"
        "try:\n    main()\nexcept SystemExit as end:\n    print(end.code, 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout == "2 False\n"
    assert done.stderr.startswith("surefoot: error: entrypoint: ")
