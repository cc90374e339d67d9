"""The whole way of a bad update: from the fault in a real job over every service to a loss that is back in band."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from helpers.stack import TestStack
from surefoot.checkpoint.attempts import AttemptLog
from surefoot.checkpoint.catalog import list_committed, verify
from surefoot.checkpoint.store import LocalStore
from surefoot.cli import demo
from surefoot.events import AttemptStarted, JobState, StepCompleted, read_events
from surefoot.spec import parse_spec
from surefoot.testing.faults import blow_up

SOURCES = Path(__file__).parents[2] / "shared" / "src"
STEPS, BAD_STEP = 300, 200


def spec_of(home: Path) -> dict[str, object]:
    return {
        "job": "heal",
        "entrypoint": "-m surefoot_worker.recipe",
        "nproc_per_node": 2,
        "threads_per_rank": 1,
        "storage": str(home / "checkpoints"),
        "run_dir": str(home / "run" / "jobs"),
        "seed": 1,
        "env": {demo.FAULT_ENVIRONMENT_KEY: str(blow_up(factor=1e4).at(step=BAD_STEP))},
        "checkpoint": {"save_every_seconds": None, "save_every_steps": 10},
        "policy": yaml.safe_load(demo.POLICY_FILE.read_text()),
        "recipe": {
            "data": str(SOURCES),
            "cache_dir": str(home.parent / "data"),
            "model": {
                "vocab_size": 512,
                "hidden_size": 96,
                "intermediate_size": 256,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
            },
            "sequence_length": 64,
            "global_batch_size": 16,
            "steps": STEPS,
            "learning_rate": 4e-3,
            "warmup_steps": 20,
        },
    }


@pytest.mark.chaos
@pytest.mark.timeout(200)
def test_a_blown_up_update_is_noticed_rolled_back_and_healed_without_a_restart(tmp_path):
    spec = parse_spec(spec_of(tmp_path / "home"))
    with TestStack(tmp_path / "home") as stack:
        stack.api.post("jobs", body={"spec": spec.model_dump(mode="json", exclude_unset=True)})
        row = stack.wait_until_final(spec.job, 150)
        rows = [stack.api.get("incidents", i["id"]) for i in stack.api.list("incidents", "jobs", spec.job, "incidents")]
    assert row["state"] == JobState.SUCCEEDED, row["reason"]
    healed = [i for i in rows if "rollback" in {action["kind"] for action in i["actions"]}]
    assert [i["state"] for i in healed] == ["HEALED"]
    assert BAD_STEP < healed[0]["detected_step"] <= BAD_STEP + 30
    assert healed[0]["recovery_seconds"] < 5
    store = LocalStore(spec.storage / spec.job)
    records = AttemptLog(store).read_all()
    assert len(records) == 2, "one roll-back, and nobody restarted the ranks"
    window = records[2].skip_windows[0]
    assert window.start < BAD_STEP <= window.stop
    assert records[2].lr_factor == 0.5
    events, _ = read_events(spec.events_path)
    _, second = (event for event in events if isinstance(event, AttemptStarted))
    assert second.from_step <= healed[0]["onset_step"] - 10
    by_step = {e.step: e.loss for e in events if isinstance(e, StepCompleted)}
    last = [by_step[step] for step in range(STEPS - 19, STEPS + 1)]
    before = [by_step[step] for step in range(BAD_STEP - 40, BAD_STEP - 20)]
    assert sum(last) < sum(before)
    for checkpoint_id in list_committed(store):
        verify(store, checkpoint_id)
    assert (stack.exit_code, stack.leftovers) == (0, [])
