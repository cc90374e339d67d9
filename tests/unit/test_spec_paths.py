"""Paths of a spec that is sent elsewhere."""

from __future__ import annotations

from pathlib import Path

from surefoot.spec import parse_spec
from surefoot.spec_paths import relative_path_keys, with_absolute_paths

HERE = Path("/here")


def test_every_path_that_is_set_becomes_absolute_and_nothing_else_is_set() -> None:
    spec = parse_spec({
        "job": "j", "entrypoint": "'my train.py' --x 'a b'", "storage": "s", "run_dir": "/r",
        "checkpoint": {"staging_dir": "shm"}, "recipe": {"data": "texts"}, "env": {"PYTHONPATH": "a:/b"},
    })  # fmt: skip
    moved = with_absolute_paths(spec, HERE)
    assert moved.model_dump(mode="json", exclude_unset=True) == {
        "job": "j", "entrypoint": "'/here/my train.py' --x 'a b'", "storage": "/here/s", "run_dir": "/r",
        "checkpoint": {"staging_dir": "/here/shm"}, "recipe": {"data": "/here/texts"},
        "env": {"PYTHONPATH": "/here/a:/b"},
    }  # fmt: skip
    assert list(relative_path_keys(moved)) == ["recipe.cache_dir"], "a default is for whoever runs the job to fill in"
    assert with_absolute_paths(moved, Path("/there")) == moved
    assert set(relative_path_keys(spec)) == {
        "entrypoint", "env.PYTHONPATH", "storage", "checkpoint.staging_dir", "recipe.data", "recipe.cache_dir",
    }  # fmt: skip


def test_a_module_is_looked_for_here_first_and_the_recipe_is_not() -> None:
    own = with_absolute_paths(parse_spec({"job": "j", "entrypoint": "-m pkg.train"}), HERE)
    assert (own.entrypoint, own.env) == ("-m pkg.train", {"PYTHONPATH": "/here"})
    recipe = with_absolute_paths(parse_spec({"job": "j", "entrypoint": "-m surefoot_worker.recipe"}), HERE)
    assert recipe.env == {}


def test_quotes_that_do_not_match_are_left_for_preflight() -> None:
    spec = parse_spec({"job": "j", "entrypoint": "'"})
    assert with_absolute_paths(spec, HERE).entrypoint == "'"
    assert "entrypoint" not in list(relative_path_keys(spec))
