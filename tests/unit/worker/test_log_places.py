"""Every line of a rank says where in training it was written, and what ended a rank is one line with its error."""

from __future__ import annotations

from structlog.testing import capture_logs

from surefoot.events import JsonlSink, RankFailed, StepCompleted
from surefoot.spec import parse_spec
from surefoot.testing.bus import MemoryBus
from surefoot_worker.service.pump import Feed


def test_lines_carry_attempt_rank_epoch_step_batch_and_error(tmp_path):
    spec = parse_spec({"job": "logs", "entrypoint": "x.py", "storage": str(tmp_path / "c"), "run_dir": str(tmp_path)})
    feed = Feed(spec, MemoryBus(), 100)
    sink = JsonlSink(spec.events_path)
    step = StepCompleted(
        job="logs", attempt=3, rank=0, step=41, position=57, updates=40, epoch=2, loss=1.0, learning_rate=0.1,
        applied=True, num_samples=8, step_seconds=(0.1,),
    )  # fmt: skip
    sink.emit(step)
    sink.emit(
        RankFailed(
            job="logs", attempt=3, rank=1, pid=5, exit_code=1, step=41, traceback="Traceback: ValueError",
            detected_seconds=0.0,
        )
    )
    with capture_logs() as lines:
        feed.turn(0.0)
    sink.close()
    (line,) = [line for line in lines if line["event"] == "rank failed"]
    wanted = {"job_id": "logs", "attempt": 3, "rank": 1, "epoch": 2, "step": 41, "batch_index": 57}
    assert wanted.items() <= line.items()
    assert line["error"] == "Traceback: ValueError"
