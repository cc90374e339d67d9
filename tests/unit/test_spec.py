"""The spec file: what it accepts, and that a refusal names the key."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from surefoot.errors import EXIT_USAGE, UsageError
from surefoot.spec import SPEC_ENVIRONMENT_KEY, ModelSpec, load_spec, parse_spec

MINIMAL = {"job": "demo", "entrypoint": "train.py"}


def test_yaml_and_json_give_the_same_spec(tmp_path: Path) -> None:
    yaml_file, json_file = tmp_path / "a.yaml", tmp_path / "a.json"
    yaml_file.write_text("job: demo\nentrypoint: train.py --lr 3e-4\ncheckpoint:\n  save_every_steps: 5\n")
    json_file.write_text(
        json.dumps({"job": "demo", "entrypoint": "train.py --lr 3e-4", "checkpoint": {"save_every_steps": 5}})
    )
    assert load_spec(yaml_file) == load_spec(json_file)


@pytest.mark.parametrize(
    ("data", "key", "told"),
    [
        ({**MINIMAL, "nproc": 2}, "nproc", "unknown key; allowed here: job, entrypoint"),
        ({"jb": "demo", "entrypoint": "x"}, "jb", "also wrong: job"),
        ({"entrypoint": "x"}, "job", "is required"),
        ({**MINIMAL, "nproc_per_node": "two"}, "nproc_per_node", "'two'"),
        ({**MINIMAL, "nproc_per_node": 0}, "nproc_per_node", "greater than or equal to 1"),
        ({**MINIMAL, "job": "Demo job"}, "job", "pattern"),
        ({**MINIMAL, "job": "../escape"}, "job", "pattern"),
        ({**MINIMAL, "job": "newline\n"}, "job", "pattern"),
        ({**MINIMAL, "checkpoint": {"num_buffers": 0}}, "checkpoint.num_buffers", "greater than or equal to 1"),
        ({**MINIMAL, "checkpoint": {"save_every_seconds": "x"}}, "checkpoint.save_every_seconds", "auto or null"),
        ({**MINIMAL, "checkpoint": {"save_every_seconds": 0}}, "checkpoint.save_every_seconds", "greater than 0"),
        ({**MINIMAL, "checkpoint": {"save_every_seconds": True}}, "checkpoint.save_every_seconds", "auto or null"),
        ({**MINIMAL, "checkpoint": {"retention": {"keep_last": 0}}}, "checkpoint.retention.keep_last", "equal to 1"),
        ({**MINIMAL, "checkpoint": {"buffers": 3}}, "checkpoint.buffers", "save_every_steps"),
        ({**MINIMAL, "checkpoint": 3}, "checkpoint", "valid dictionary"),
        ({**MINIMAL, "recipe": {"model": {"heads": 4}}}, "recipe.model.heads", "num_attention_heads"),
        ({**MINIMAL, "recipe": {"model": {"hidden_size": 10}}}, "recipe.model", "multiple of num_attention_heads"),
        ({**MINIMAL, "recipe": {"precision": "fp16"}}, "recipe.precision", "'fp32'"),
        ({**MINIMAL, "start_method": "fork"}, "start_method", "'forkserver'"),
        ({**MINIMAL, "env": {"A": 1}}, "env.A", "valid string"),
        ({1: 2, **MINIMAL}, "1", "Keys should be strings"),
    ],
)
def test_refusal_names_the_key_and_what_is_allowed(data: dict, key: str, told: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_spec(data)
    assert caught.value.key == key
    assert told in str(caught.value)
    assert caught.value.exit_code == EXIT_USAGE


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.yaml", b"job: [unclosed", "is not valid YAML"),
        ("a.yaml", b"job: 2026-13-45", "is not valid YAML"),
        ("a.yaml", b"just text", "must hold a mapping"),
        ("a.yaml", b"", "must hold a mapping"),
        ("a.yaml", b"\xff\xfe\x00", "is not UTF-8"),
        ("a.yaml", b"!!python/object/apply:os.system ['true']", "is not valid YAML"),
        ("a.json", b"{'job': 1}", "is not valid JSON"),
        ("a.json", b"[" * 100_000, "is not valid JSON"),
    ],
)
def test_unreadable_files_are_one_line(tmp_path: Path, name: str, content: bytes, told: str) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        load_spec(file)
    assert caught.value.key == str(file)
    assert told in caught.value.problem
    assert "\n" not in str(caught.value)


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        load_spec(tmp_path / "none.yaml")
    with pytest.raises(UsageError, match="Is a directory"):
        load_spec(tmp_path)


def test_environment_carries_what_was_set_with_absolute_paths() -> None:
    spec = parse_spec({**MINIMAL, "checkpoint": {"num_buffers": 4}})
    carried = json.loads(spec.to_environment()[SPEC_ENVIRONMENT_KEY])
    assert carried["checkpoint"] == {"num_buffers": 4}
    assert Path(carried["storage"]).is_absolute()
    assert "seed" not in carried
    assert parse_spec(carried).checkpoint == spec.checkpoint


def test_number_of_parameters_of_the_default_model() -> None:
    # counted by torch for LlamaForCausalLM of this config
    assert ModelSpec().num_parameters() == 4_212_992
