"""Cases P2 and the ways a launcher starts, stops and refuses; real processes, a real gloo group, no sdk."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from helpers.jobs import Job
from helpers.launcher import RING, finish, output, processes_of, started, until, until_trains
from surefoot.events import JobFinished, JobState, RankFailed, RanksRestarted
from surefoot.processes import JOB_KEY_ENVIRONMENT_KEY, find_job_processes, kill_job_processes

MakeJob = Callable[..., Job]


def script(folder: Path, text: str) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "own.py"
    path.write_text(text)
    return str(path)


def ended(job: Job) -> JobFinished:
    events = job.events(JobFinished)
    assert len(events) == 1
    return events[0]


def test_p2_import_error_at_start_costs_no_restart(make_job: MakeJob) -> None:
    job = make_job(entrypoint=f"{RING} 100 rank=1 step=1 what=importerror")
    run = job.run(expect=1)
    finished = ended(job)
    assert (finished.state, finished.restarts) == (JobState.FAILED, 0)
    assert "rank 1 raised ModuleNotFoundError" in finished.reason
    assert "import surefoot_has_no_such_module" in finished.reason  # the line, so its traceback
    assert "surefoot_has_no_such_module" in run.stdout
    assert "surefoot_worker" not in finished.reason.partition("Traceback")[2]
    assert [event.rank for event in job.events(RankFailed)] == [1]


def test_p2_same_exception_at_the_same_step_costs_at_most_two_restarts(make_job: MakeJob) -> None:
    job = make_job(entrypoint=f"{RING} 100 rank=0 step=3 what=raise")
    job.run(expect=1)
    finished = ended(job)
    assert finished.state is JobState.FAILED
    assert 1 <= finished.restarts <= 2
    assert "rank 0 raised ValueError: the same every time after step 2" in finished.reason
    assert {(event.rank, event.step, event.error_type) for event in job.events(RankFailed)} == {(0, 2, "ValueError")}


@pytest.mark.slow
def test_p3_a_thread_that_does_not_end_cannot_keep_a_failed_rank(make_job: MakeJob) -> None:
    job = make_job(entrypoint=f"{RING} 100 rank=1 step=2 what=hangingthread", spec={"restart": {"max_restarts": 0}})
    job.run(expect=1)
    assert "with a thread that does not end" in ended(job).reason


@pytest.mark.slow  # P2 and test_misuse have one of each; unit/launcher has the decisions
@pytest.mark.parametrize(("what", "code"), [("usage", 2), ("exit3", 1)])
def test_exit_codes_of_ranks_are_honoured(make_job: MakeJob, what: str, code: int) -> None:
    job = make_job(entrypoint=f"{RING} 100 rank=1 step=1 what={what}", spec={"restart": {"max_restarts": 1}})
    job.run(expect=code)
    failures = job.events(RankFailed)
    assert failures[0].rank == 1
    assert failures[0].exit_code == {"usage": 2, "exit3": 3}[what]
    assert len(failures) == {"usage": 1, "exit3": 2}[what]


@contextmanager
def left_over(job: Job) -> Iterator[subprocess.Popen[bytes]]:
    """Give a process of the job, with a child, that an earlier launcher seems to have left."""
    code = "import os, time\nif os.fork(): print('up', flush=True)\ntime.sleep(1000)"
    environment = os.environ | {JOB_KEY_ENVIRONMENT_KEY: job.staging.name}
    with subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        assert len(find_job_processes(job.staging.name)) == 2
        yield process


@pytest.mark.parametrize("method", ["forkserver", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_script_runs_as_python_would_run_it(make_job: MakeJob, tmp_path: Path, method: str) -> None:
    """And before it starts, what is left over of the job is swept."""
    text = """
import atexit, json, os, sys
import beside_the_script
def at_exit(): print("at exit", __name__)
atexit.register(at_exit)
print(json.dumps([__name__, sys.argv, sys.path[0], __file__, sys.modules["__main__"].__file__, beside_the_script.X]))
print("to stderr", file=sys.stderr)
print(os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["OWN"], os.environ["SUREFOOT_JOB_KEY"])
if __name__ == "__main__":
    sys.exit(0)
"""
    folder = tmp_path / "scripts"
    path = script(folder, text)
    (folder / "beside_the_script.py").write_text("X = 7\n")
    job = make_job(entrypoint=f"{path} --lr 3e-4 'two words'", spec={"start_method": method, "env": {"OWN": "mine"}})
    with left_over(job) as swept:
        job.run()
        assert swept.wait(5) == -signal.SIGKILL
    assert kill_job_processes(job.staging.name) == []
    for rank in (0, 1):
        header, first, second, last = output(job, rank).splitlines()
        assert header.startswith(f"--- surefoot: rank {rank} starts, pid ")
        arguments = [path, "--lr", "3e-4", "two words"]
        assert json.loads(first) == ["__main__", arguments, str(folder), path, path, 7]
        assert second == f"{rank} 2 mine {job.staging.name}"
        assert last == "at exit __main__"
        assert output(job, rank, "err").splitlines()[1] == "to stderr"
    assert job.events(RanksRestarted)[0].start_method == method
    assert not job.staging.exists()  # nobody used it, so nothing stays in memory


@pytest.mark.slow  # every job of the recipe is a module
def test_a_module_runs_as_main(make_job: MakeJob, tmp_path: Path) -> None:
    package = tmp_path / "own_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "part.py").write_text("import os\nPID = os.getpid()\n")
    (package / "__main__.py").write_text(
        "import os, sys\nfrom .part import PID\nprint(__name__, sys.argv[1:], sys.path[0], PID == os.getpid())\n"
    )
    job = make_job(entrypoint="-m own_package a b", spec={"env": {"PYTHONPATH": str(tmp_path)}})
    job.run()
    # The part was imported by the fork server, in another process; the file itself runs here.
    assert output(job, 0).splitlines()[1] == f"__main__ ['a', 'b'] {Path.cwd()} False"


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        pytest.param("import os\nos.environ['RANK']\n", "KeyError: 'RANK'", marks=pytest.mark.slow),
        ("import threading as t\nt.Thread(target=t.Event().wait, daemon=True).start()\n", "start threads"),
        pytest.param("import os\nos._exit(3)\n", "did not say that it is ready", marks=pytest.mark.slow),
    ],
    ids=["raises", "thread", "dies"],
)
def test_spawn_with_a_reason_where_preloading_fails(
    make_job: MakeJob, tmp_path: Path, module: str, reason: str
) -> None:
    folder = tmp_path / "scripts"
    path = script(folder, "import hostile_to_preloading\nprint('trained')\n")
    if "_exit" in module:  # only in the fork server, or the rank would end too
        module = "import os\nif 'RANK' not in os.environ: os._exit(3)\n"
    (folder / "hostile_to_preloading.py").write_text(module)
    job = make_job(entrypoint=path, nproc=1)
    job.run()
    event = job.events(RanksRestarted)[0]
    assert event.start_method == "spawn"
    assert reason in event.start_method_reason
    assert output(job, 0).splitlines()[-1] == "trained"


def test_p1_output_is_kept_across_restarts_and_sigterm_stops_at_a_step_boundary(make_job: MakeJob) -> None:
    job = make_job(entrypoint=f"{RING} 100000")
    with started(job) as process:
        for start in range(3):
            os.kill(until_trains(job, start)[1], signal.SIGKILL)
        until_trains(job, 3)
        process.send_signal(signal.SIGUSR1)
        until(lambda: "save 1\n" in output(job, 0) and "save 1\n" in output(job, 1), "both save")
        process.send_signal(signal.SIGTERM)
        assert finish(process)[0] == 75
        stops = {output(job, rank).splitlines()[-1] for rank in (0, 1)}
        assert len(stops) == 1
        assert stops.pop().startswith("stopped after step ")
        assert ended(job).state is JobState.STOPPED
        assert ended(job).attempt is None or ended(job).attempt == 1
        for rank in (0, 1):
            lines = output(job, rank).splitlines()
            headers = [line for line in lines if line.startswith("--- surefoot")]
            causes = [line.partition("+00:00, ")[2] for line in headers]
            assert causes[0] == "started by the user ---"
            assert [cause.startswith("restart: rank 1 was killed by SIGKILL") for cause in causes[1:]] == [True] * 3
            firsts = [line for line in lines if line.startswith("first")]
            assert firsts == [f"first step of start {start}" for start in range(4)]


def test_p1_sigterm_to_every_process_stops_at_a_step_boundary(make_job: MakeJob) -> None:
    """And before it a second launcher is refused, which the first does not notice."""
    job = make_job(entrypoint=f"{RING} 100000")
    with started(job) as process:
        pids = until_trains(job)
        code, text = finish(job.start())
        assert code == 2
        assert f"process {process.pid}" in text
        assert process.poll() is None
        os.killpg(process.pid, signal.SIGTERM)
        for pid in pids:  # Slurm and systemd signal every process of the job, whatever its group
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGINT)
        assert finish(process)[0] == 75
        assert output(job, 0).splitlines()[-1].startswith("stopped after step ")
        assert job.events(RankFailed) == []


@pytest.mark.slow  # test_adversity has a second signal, to a job of the sdk
def test_a_second_signal_kills_at_once(make_job: MakeJob, tmp_path: Path) -> None:
    path = script(tmp_path / "s", f"import sys\nsys.argv = ['x', '1']\nexec(open({str(RING)!r}).read().replace("
                                  "'dist.destroy_process_group()', 'time.sleep(1000)'))\n")  # fmt: skip
    job = make_job(entrypoint=path)
    with started(job) as process:
        until_trains(job)
        process.send_signal(signal.SIGINT)
        launcher_log = job.folder / "run" / job.name / "logs" / "launcher.log"
        until(lambda: "asking the ranks" in launcher_log.read_text(), "the first signal is taken")
        process.send_signal(signal.SIGINT)
        assert finish(process)[0] == 1
        assert "second SIGINT" in ended(job).reason
        assert processes_of(job) == []


def test_ranks_that_cannot_obey_are_not_waited_for(make_job: MakeJob, tmp_path: Path) -> None:
    path = script(tmp_path / "s", "import time\nprint('up', flush=True)\ntime.sleep(1000)\n")
    job = make_job(entrypoint=path)
    with started(job) as process:
        until(lambda: "up" in output(job, 1), "rank 1 runs")
        process.send_signal(signal.SIGTERM)
        assert finish(process)[0] == 75


@pytest.mark.slow  # unit/sdk has the seeds
def test_numpy_and_python_random_differ_between_ranks(make_job: MakeJob, tmp_path: Path) -> None:
    path = script(tmp_path / "s", "import random, numpy as np\nprint(np.random.rand(), random.random())\n")
    job = make_job(entrypoint=path)
    job.run()
    assert len({value for rank in (0, 1) for value in output(job, rank).splitlines()[1].split()}) == 4
