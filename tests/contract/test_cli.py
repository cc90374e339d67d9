"""The command line as scripts see it: commands, options, exit codes, JSON, and never a traceback."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from helpers.checkpoints import commit
from helpers.command_line import Surefoot
from surefoot import __version__
from surefoot.checkpoint.attempts import AttemptLog, Source, StartsFrom
from surefoot.checkpoint.ids import CheckpointId, folder_name
from surefoot.checkpoint.manifest import MANIFEST_FILE
from surefoot.checkpoint.store import LocalStore
from surefoot.cli import main as cli

COMMANDS = [
    [],
    ["run"],
    ["verify"],
    ["checkpoints"],
    ["checkpoints", "list"],
    ["checkpoints", "show"],
    ["checkpoints", "pin"],
    ["checkpoints", "unpin"],
    ["checkpoints", "prune"],
    ["checkpoints", "rescan"],
    ["checkpoints", "export"],
    ["checkpoints", "import"],
    ["attempts"],
    ["spec"],
    ["spec", "check"],
    ["demo"],
    ["up"],
    ["down"],
    ["status"],
    ["serve"],
    ["db"],
    ["db", "upgrade"],
    ["doctor"],
    ["submit"],
    ["jobs"],
    ["watch"],
    ["logs"],
    ["stop"],
    ["save"],
    ["rollback"],
    ["set-lr"],
    ["incidents"],
    ["checkpoints", "of"],
]
CLIENT_COMMANDS = [
    ["jobs"],
    ["watch", "j"],
    ["logs", "j"],
    ["stop", "j"],
    ["save", "j"],
    ["rollback", "j"],
    ["set-lr", "j", "0.5"],
    ["incidents", "j"],
    ["checkpoints", "j"],
]


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A job of two attempts: the second began at step 20, so step 30 of the first is abandoned."""
    folder = tmp_path / "storage" / "demo"
    log = AttemptLog(LocalStore(folder))
    common = {"world_size": 2, "host": "box", "started_at": datetime(2026, 12, 1, tzinfo=UTC)}
    log.claim(after=0, starts_from=StartsFrom(attempt=0, step=0, source=Source.SEED), cause="first start", **common)
    start = StartsFrom(attempt=1, step=20, source=Source.COMMITTED)
    log.claim(after=1, starts_from=start, cause="rank 1 was killed", lr_factor=0.5, **common)
    for checkpoint_id in (CheckpointId(1, 20), CheckpointId(1, 30), CheckpointId(2, 40)):
        commit(folder, checkpoint_id)
    return folder


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: " ".join(words) or "surefoot")
def test_every_command_has_help(surefoot: Surefoot, command: list[str]) -> None:
    result = surefoot(*command, "--help")
    assert result.code == 0
    assert "Usage:" in result.out


def test_help_lists_the_commands_and_the_exit_codes(surefoot: Surefoot) -> None:
    text = " ".join(surefoot("--help").out.split())
    for word in ("run", "verify", "attempts", "demo", "checkpoints", "spec", "3 damage found", "75 stopped on request"):
        assert word in text


@pytest.mark.parametrize("words", CLIENT_COMMANDS, ids=" ".join)
def test_without_a_stack_commands_that_need_one_say_what_to_do(
    surefoot: Surefoot, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SUREFOOT_API_URL", raising=False)
    monkeypatch.delenv("SUREFOOT_HOME", raising=False)
    result = surefoot(*words)
    assert (result.code, result.out, result.err.count("\n")) == (1, "", 1)
    assert f"no stack runs in {tmp_path / '.surefoot'}" in result.err
    assert "surefoot up" in result.err
    assert list(tmp_path.iterdir()) == []


def test_an_address_of_the_api_must_be_one(surefoot: Surefoot, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUREFOOT_API_URL", "localhost:8470")
    result = surefoot("jobs")
    assert (result.code, "SUREFOOT_API_URL" in result.err) == (2, True)


def test_version(surefoot: Surefoot) -> None:
    assert surefoot("--version") == (0, f"surefoot {__version__}\n", "")


@pytest.mark.parametrize(
    "words",
    [
        ["nonsense"],
        ["verify"],
        ["verify", "--nonsense", "x"],
        ["verify", "no-such-folder"],
        ["checkpoints", "list", "no-such-folder"],
        ["checkpoints", "show", "no-such-folder"],
        ["checkpoints", "pin", "no-such-folder", "--reason", "r"],
        ["checkpoints", "unpin", "no-such-folder"],
        ["checkpoints", "prune", "no-such-folder"],
        ["checkpoints", "prune", ".", "--keep-last", "0"],
        ["checkpoints", "rescan", "no-such-folder"],
        ["checkpoints", "export", "no-such-folder", "out"],
        ["checkpoints", "import", "no-such-folder", "new"],
        ["attempts", "no-such-folder"],
        ["spec", "check", "no-such-file"],
        ["run", "no-such-file"],
        ["run", "."],
        ["submit", "no-such-file"],
        ["submit", "."],
        ["watch"],
        ["set-lr", "j"],
        ["rollback", "j", "--to-step", "0"],
        ["demo", "--steps", "5"],
        ["demo", "--data", "no-such-folder"],
        ["demo", "--work-dir", "/proc/surefoot"],
        ["demo", "--json", "."],
        ["demo", "--json", "/proc/surefoot/report.json"],
        ["demo", "--seed", str(2**63)],
    ],
    ids=" ".join,
)
def test_bad_words_exit_2_and_write_nothing(
    surefoot: Surefoot, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = surefoot(*words)
    assert result.code == 2
    assert result.err
    assert list(tmp_path.iterdir()) == []


def test_the_demo_names_its_own_options(surefoot: Surefoot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "error: --data: " in surefoot("demo", "--data", "nowhere").err
    assert "error: --seed: " in surefoot("demo", "--seed", 2**63).err


def test_verify_takes_a_checkpoint_a_job_and_a_storage_root(surefoot: Surefoot, job: Path) -> None:
    for path, num_good in ((job / folder_name(CheckpointId(2, 40)), 1), (job, 3), (job.parent, 3)):
        result = surefoot("verify", path)
        assert result.code == 0
        assert f"{num_good} good, 0 damaged" in result.out
    verdicts = json.loads(surefoot("verify", job, "--json").out)
    assert [(v["attempt"], v["step"], v["ok"]) for v in verdicts] == [(1, 20, True), (1, 30, True), (2, 40, True)]


@pytest.mark.parametrize("file", ["rank-00001.safetensors", "rank-00000.json", MANIFEST_FILE])
def test_verify_finds_one_wrong_bit_in_any_file(surefoot: Surefoot, job: Path, file: str) -> None:
    damaged = job / folder_name(CheckpointId(1, 30))
    flip_a_byte(damaged / file)
    assert surefoot("verify", job / folder_name(CheckpointId(1, 20))).code == 0
    assert surefoot("verify", damaged).code == 3
    result = surefoot("verify", job)
    assert result.code == 3
    assert str(damaged / file) in result.out
    assert "2 good, 1 damaged" in result.out
    assert [v["ok"] for v in json.loads(surefoot("verify", job, "--json").out)] == [True, False, True]


def test_verify_finds_a_missing_file(surefoot: Surefoot, job: Path) -> None:
    (job / folder_name(CheckpointId(2, 40)) / "rank-00000.safetensors").unlink()
    assert surefoot("verify", job).code == 3


def test_verify_refuses_what_is_not_a_checkpoint(surefoot: Surefoot, job: Path, tmp_path: Path) -> None:
    uncommitted = job / folder_name(CheckpointId(2, 50))
    uncommitted.mkdir()
    result = surefoot("verify", uncommitted)
    assert result.code == 2
    assert "never committed" in result.err
    fresh = tmp_path / "fresh"
    (fresh / "attempts").mkdir(parents=True)
    assert surefoot("verify", fresh).code == 2


def test_checkpoints_list_shows_what_a_restart_may_use(surefoot: Surefoot, job: Path) -> None:
    for path in (job, job.parent):
        entries = json.loads(surefoot("checkpoints", "list", path, "--json").out)
        states = [(entry["step"], entry["state"]) for entry in entries]
        assert states == [(40, "current"), (30, "abandoned"), (20, "current")]
    assert "abandoned" in surefoot("checkpoints", "list", job).out
    flip_a_byte(job / folder_name(CheckpointId(2, 40)) / MANIFEST_FILE)
    assert json.loads(surefoot("checkpoints", "list", job, "--json").out)[0]["state"] == "damaged"


def test_checkpoints_show(surefoot: Surefoot, job: Path) -> None:
    newest = json.loads(surefoot("checkpoints", "show", job, "--json").out)
    assert (newest["manifest"]["step"], newest["scalars"]) == (40, {"updates": 40})
    older = surefoot("checkpoints", "show", job / folder_name(CheckpointId(1, 20)))
    assert "step 20, attempt 1, 2 ranks" in older.out
    flip_a_byte(job / folder_name(CheckpointId(2, 40)) / MANIFEST_FILE)
    assert surefoot("checkpoints", "show", job).code == 3


def test_attempts(surefoot: Surefoot, job: Path) -> None:
    table = surefoot("attempts", job).out
    for part in ("step 20 of attempt 1", "COMMITTED", "rank 1 was killed", "0.5", "2026-12-01 00:00:00"):
        assert part in table
    records = json.loads(surefoot("attempts", job, "--json").out)
    assert [record["starts_from"]["step"] for record in records] == [0, 20]
    (job / "attempts" / "000002.json").write_text("{")
    damaged = surefoot("attempts", job)
    assert (damaged.code, damaged.err.count("\n")) == (1, 1)
    assert "000002.json" in damaged.err


def test_a_path_with_several_jobs_is_asked_about(surefoot: Surefoot, job: Path) -> None:
    commit(job.parent / "other", CheckpointId(1, 5))
    result = surefoot("attempts", job.parent)
    assert result.code == 2
    assert "holds several jobs" in result.err
    assert "8 good" not in surefoot("verify", job.parent).out
    assert "4 good, 0 damaged" in surefoot("verify", job.parent).out


def test_spec_check(surefoot: Surefoot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
    Path("spec.json").write_text(json.dumps({"job": "j", "entrypoint": "train.py"}))
    assert surefoot("spec", "check", "spec.json").out.startswith("spec.json: ok: job 'j'")
    assert "max_restarts: 20" in surefoot("spec", "check", "-v", "spec.json").out
    assert json.loads(surefoot("spec", "check", "--json", "spec.json").out)["nproc_per_node"] == 1


def test_run_without_the_worker_says_what_to_install(surefoot: Surefoot, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "entry_points", lambda group: ())
    result = surefoot("run", "spec.yaml", "--quiet")
    assert result.code == 2
    assert "pip install surefoot-worker" in result.err
    assert "run" in surefoot("--help").out


def test_a_plug_in_that_cannot_be_imported_breaks_only_itself(
    surefoot: Surefoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = EntryPoint("fly", "surely_not_there:fly", cli.PLUGIN_GROUP)
    monkeypatch.setattr(cli, "entry_points", lambda group: (broken,))
    assert surefoot("--help").code == 0
    result = surefoot("fly")
    assert result.code == 2
    assert "surely_not_there" in result.err


def test_the_installed_command_and_a_closed_pipe(job: Path) -> None:
    command = [sys.executable, "-m", "surefoot.cli.main", "verify", str(job)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    script = f"{sys.executable} -m surefoot.cli.main checkpoints list {job} --json | true"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=30, check=False)
    assert "Traceback" not in done.stderr
