"""One rank of a contender of `bench.checkpoint`: train, save every so many steps, load, write down what was seen.

    torchrun --nproc-per-node N -m bench.checkpoint_loop --contender NAME --out DIR ...

Writes <out>/rank-N.json: what `bench.checkpoint_figures.Run` holds, of this rank.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from bench.checkpoint_figures import Run, SaveRecord
from bench.checkpoint_model import Training, world
from bench.checkpoint_peers import SAVERS, Peer, batches, evict
from helpers.waiting import wait_until
from surefoot import sdk
from surefoot.checkpoint.attempts import Source
from surefoot.checkpoint.catalog import verify
from surefoot.checkpoint.ids import CheckpointId, folder_name
from surefoot.events import CheckpointCommitted, read_events
from surefoot.sdk.replication import replicate
from surefoot.sdk.restore import Candidate, restore
from surefoot.sdk.session import Session
from surefoot.sdk.snapshot import Snapshots

MAX_GRAD_NORM = 1.0
DURABLE_LIMIT_SECONDS = 120.0

CHECKPOINT_SECTIONS: dict[str, dict[str, Any]] = {
    "surefoot": {"snapshot_every_steps": 0, "num_buffers": 2},
    "surefoot+every step": {},
}
"""Contender -> its checkpoint section: only saves, as the others do, and what comes without any setting."""


def train_peer(training: Training, options: argparse.Namespace) -> Run:
    """The loop that everybody writes, with one of the other ways of saving in it."""
    dist.init_process_group("gloo")
    rank, world_size = world()
    peer = SAVERS[options.contender](training, options.out / "checkpoints", rank)
    model = replicate(training.model, world_size, init_sync=True)
    run = Run([], peer.records)
    for step, batch in enumerate(batches(training, rank, world_size), start=1):
        model(input_ids=batch, labels=batch).loss.backward()
        peer.before_update()
        torch.nn.utils.clip_grad_norm_(training.model.parameters(), MAX_GRAD_NORM)
        training.optimizer.step()
        training.optimizer.zero_grad(set_to_none=True)
        run.ends.append(time.monotonic())
        if step == options.steps:
            break
        if step % options.every == 0:
            peer.save(step)
            if len(run.saves) == 1:
                peer.wait()  # a process that is started for the first save takes seconds
    peer.wait()
    measure_peer(peer, run)
    peer.close()
    dist.destroy_process_group()
    return run


def measure_peer(peer: Peer, run: Run) -> None:
    """fsync what the last save wrote, then load it."""
    if run.saves:
        run.saves[-1].sync_seconds = peer.sync_seconds()
    dist.barrier()
    run.loads = peer.load()


class Watched:
    """Notes when snapshots are taken, from outside of the session."""

    def __init__(self, run: Run) -> None:
        self._run = run
        take = Snapshots.take

        @functools.wraps(take)
        def timed(snapshots: Snapshots, checkpoint_id: CheckpointId, *args: Any, persist: bool, **more: Any) -> bool:
            started = time.monotonic()
            taken = take(snapshots, checkpoint_id, *args, persist=persist, **more)
            seconds = time.monotonic() - started
            if not taken:
                return False
            if persist:
                run.ends.append(started)
                run.saves.append(SaveRecord(checkpoint_id.step, started, seconds))
            else:
                run.snapshot_seconds.append(seconds)
            return True

        cast(Any, Snapshots).take = timed

    def step_ended(self, step: int) -> None:
        """Note the end of a step that was not saved; of one that was it is the beginning of its save."""
        if not self._run.saves or self._run.saves[-1].step != step:
            self._run.ends.append(time.monotonic())


def train_surefoot(training: Training, options: argparse.Namespace) -> Run:
    """The loop of Surefoot's README."""
    run = Run([], [])
    watched = Watched(run)
    session = sdk.attach(
        training.model,
        training.optimizer,
        dataset=training.data,
        global_batch_size=world()[1],
        max_grad_norm=MAX_GRAD_NORM,
        job="bench",
        storage=options.out / "checkpoints",
        run_dir=options.out / "run",
        checkpoint=CHECKPOINT_SECTIONS[options.contender]
        | {"save_every_seconds": None, "save_every_steps": options.every, "staging_dir": options.staging},
    )
    for batch in session:
        session.step(session.model(input_ids=batch, labels=batch).loss)
        watched.step_ended(session.global_step)
        if session.global_step == options.steps:
            break
    run_before_the_end = Run(run.ends, list(run.saves), snapshot_seconds=run.snapshot_seconds)
    measure_surefoot(session, run_before_the_end, training.state_bytes, options.out)
    session.close()
    if session.rank == 0:
        # What close() saved was written with nothing beside it.
        last = committed(options.out)[run.saves[-1].step]
        run_before_the_end.throughput["drain, nothing beside it"] = last.num_bytes / last.write_seconds
    return run_before_the_end


def measure_surefoot(session: Session, run: Run, state_bytes: int, out: Path) -> None:
    """Find out when each save became durable, then restore the last one from memory and from the disk."""
    last = CheckpointId(session.attempt, run.saves[-1].step)
    wait_until(lambda: last.step in committed(out), DURABLE_LIMIT_SECONDS, f"the save of step {last.step}")
    for save in run.saves:
        save.durable_at = committed(out)[save.step].monotonic_seconds
    host, state = session._host, session._snapshots._state
    for name, source in (("staging", Source.STAGED), ("storage", Source.COMMITTED)):
        folder = out / "checkpoints" / "bench" / folder_name(last)
        evict(folder)
        host.group.gather_json(None)
        started = time.monotonic()
        restore(host, state, [Candidate(last, source)])
        run.loads[name] = time.monotonic() - started
        host.group.gather_json(None)
    if session.rank == 0:
        evict(folder)
        started = time.monotonic()
        verify(host.store, last)
        run.throughput = {"verify": state_bytes / (time.monotonic() - started)}
        events = [committed(out)[save.step] for save in run.saves]
        run.throughput["drain, beside training"] = sum(e.num_bytes for e in events) / sum(
            e.write_seconds for e in events
        )


def committed(out: Path) -> dict[int, CheckpointCommitted]:
    """Return the commits so far by step."""
    events, _ = read_events(out / "run" / "bench" / "events.jsonl")
    return {event.step: event for event in events if isinstance(event, CheckpointCommitted)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--contender", required=True, choices=[*SAVERS, *CHECKPOINT_SECTIONS])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--staging", type=Path, required=True)
    parser.add_argument("--params", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--every", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    options = parser.parse_args()
    training = Training.build(options.params, options.tokens)
    train = train_surefoot if options.contender in CHECKPOINT_SECTIONS else train_peer
    run = train(training, options)
    content = asdict(run) | {"state_bytes": training.state_bytes}
    (options.out / f"rank-{world()[0]}.json").write_text(json.dumps(content))


if __name__ == "__main__":
    main()
