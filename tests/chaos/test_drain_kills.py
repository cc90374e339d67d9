"""Drains killed at every system call, and the drains of two nodes: one checkpoint, bit for bit, and nothing else."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest

from helpers.drains import Node
from helpers.forked import Forge
from helpers.staging import Ranks, claim, storage_files
from surefoot.checkpoint.catalog import list_committed, verify
from surefoot.checkpoint.drain_work import Drain
from surefoot.checkpoint.ids import CheckpointId
from surefoot.events import CheckpointCommitted, MemorySink

pytestmark = pytest.mark.chaos

MANY_CALLS = 150
"""More than a drain of the template makes; those beyond its end are skipped."""
SAMPLE = range(1, MANY_CALLS, 13)


def ids(*pairs):
    return [CheckpointId(*pair) for pair in pairs]


@pytest.fixture(scope="module")
def forge():
    with Forge("helpers.drains") as forge:
        yield forge


# --- SIGKILL at every system call ---

COMMITTED = ids((1, 5), (2, 10), (2, 11))


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """A job with all that a drain can meet.

    Step 5 is committed, step 8 was left half-written, the next attempt went on from 5, wants 10 to be saved and has 11
    in memory.
    """
    root = tmp_path_factory.mktemp("template")
    node = Node(root, root / "storage").make()
    claim(node.store, 0)
    first = Ranks(node.folder, attempt=1)
    first.save(5, persist=True)
    Drain(staging=node.folder, store=node.store, sink=MemorySink(), job="job").work()
    node.store.write("step-000000008-a0001/rank-00000.safetensors", [b"half"])
    claim(node.store, 1, attempt=1, step=5)
    second = Ranks(node.folder, attempt=2)
    assert second.save(10, persist=True)
    assert second.save(11)
    node.close()
    return root


def copy_of(template: Path, root: Path) -> Node:
    """Return another job in the same state. The name of the staging folder is part of its buffers, so it stays."""
    shutil.copytree(template / "storage", root / "storage")
    (staging,) = (template / "staging").glob("surefoot-*/*")
    node = Node(root, root / "storage")
    node.folder.path = root / "staging" / staging.parent.name / staging.name
    node.folder.path.parent.mkdir(parents=True, mode=0o700)
    shutil.copytree(staging, node.folder.path, ignore=shutil.ignore_patterns("wake.fifo"))
    node.make_wake()
    return node


def check_all_is_durable(node: Node) -> None:
    assert list_committed(node.store) == COMMITTED
    for checkpoint in COMMITTED:
        verify(node.store, checkpoint)
        Ranks(None, checkpoint.attempt).check_committed(node.store, checkpoint.step)
    files = storage_files(node.store.root)
    assert len(files) == 3 * 5 + len(["attempts/000001.json", "attempts/000002.json", "reserve.bin"]), files
    assert {(event.attempt, event.step) for event in node.events(CheckpointCommitted)} == set(COMMITTED[1:])
    assert list(node.folder.path.parent.iterdir()) == []


def kill_at(forge: Forge, template: Path, root: Path, nth: int) -> str | None:
    """Kill a drain at its nth call and let another finish; return the name of the call, None when it made fewer."""
    node = copy_of(template, root)
    report = root / "calls.json"
    arguments = {"arguments": node.arguments(), "kill_at": nth, "report": str(report)}
    ended = forge.fork("traced_drain", arguments, log=node.log).wait(30)
    calls = json.loads(report.read_text())
    if len(calls) < nth:
        check_all_is_durable(node)
        return None
    assert ended == 0, node.log.read_text()
    assert set(list_committed(node.store)) <= set(COMMITTED)
    verify(node.store, COMMITTED[0])
    assert forge.fork("drain", {"arguments": node.arguments()}, log=node.log).wait(30) == 0
    check_all_is_durable(node)
    shutil.rmtree(root)
    return str(calls[-1])


@pytest.fixture(scope="module")
def traceable(forge, tmp_path_factory):
    report = tmp_path_factory.mktemp("trace") / "why"
    forge.fork("write_why_not", {"report": str(report)}, log=report.with_suffix(".log")).wait(30)
    reason = report.read_text()
    if reason:
        pytest.skip(reason)


def test_a_drain_killed_at_a_sample_of_its_system_calls_is_finished_by_the_next(forge, template, tmp_path, traceable):
    killed = [kill_at(forge, template, tmp_path / str(nth), nth) for nth in SAMPLE]
    assert len(set(filter(None, killed))) >= 4, killed


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_drain_killed_at_any_system_call_is_finished_by_the_next(forge, template, tmp_path, traceable):
    killed = []
    for nth in range(1, MANY_CALLS):
        killed.append(kill_at(forge, template, tmp_path / str(nth), nth))
        if killed[-1] is None:
            break
    assert killed[-1] is None, f"a drain makes more than {MANY_CALLS} calls"
    assert {"openat", "write", "fsync", "rename", "link", "unlink", "mkdir"} <= set(killed)


# --- two nodes ---


@pytest.fixture
def nodes(tmp_path):
    """Two nodes of a job with one storage; ranks 0 and 1 on the first, 2 and 3 on the second."""
    nodes = [Node(tmp_path / name, tmp_path / "storage").make() for name in ("a", "b")]
    claim(nodes[0].store, 0)
    yield nodes
    for node in nodes:
        node.close()


def ranks_of(nodes: list[Node]) -> list[Ranks]:
    return [Ranks(node.folder, 1, world_size=4, here=here) for node, here in zip(nodes, ([0, 1], [2, 3]), strict=True)]


def check_one_commit(nodes: list[Node], step: int) -> None:
    store = nodes[0].store
    assert list_committed(store) == ids((1, step))
    Ranks(None, 1, world_size=4).check_committed(store, step)
    verify(store, CheckpointId(1, step))
    files = storage_files(store.root)
    assert len(files) == 9 + len(["attempts/000001.json", "reserve.bin"]), files
    assert {event.step for event in nodes[0].events(CheckpointCommitted)} == {step}
    assert nodes[1].events(CheckpointCommitted) == []
    for node in nodes:
        assert not node.folder.path.exists()


# A drain writes shard, part, shard, part; the last to see all parts then writes the manifest.
EVERY_DRAIN_COMES_TO = [
    *(f"store.write.{point}=kill@{nth}" for point in ("opened", "synced", "renamed") for nth in (1, 2, 4)),
    "drain.shard_written=kill@2",
    "drain.part_written=kill@2",
    "drain.marked=kill",
]
ONE_DRAIN_COMES_TO = [
    *(f"store.write.{point}=kill@5" for point in ("opened", "synced", "renamed")),
    "drain.before_manifest=kill",
    "drain.manifest_written=kill",
]
FAULTS = ["", "store.write.synced=eio@2", *EVERY_DRAIN_COMES_TO, *ONE_DRAIN_COMES_TO]
VICTIMS = ("ab", "a", "b")
CASES = [
    # Each fault with one choice of victims in `make test`, with all of them in `make test-slow`.
    pytest.param(fault, victims, marks=[] if index % 3 == choice else pytest.mark.slow)
    for index, fault in enumerate(FAULTS)
    for choice, victims in enumerate(VICTIMS)
]


@pytest.mark.parametrize(("fault", "victims"), CASES)
def test_two_drains_make_one_manifest_wherever_either_is_killed(forge, nodes, fault, victims):
    for ranks in ranks_of(nodes):
        ranks.save(10, persist=True)

    def start(node, fault=""):
        return forge.fork("drain", {"arguments": node.arguments(), "fault": fault}, log=node.log)

    drains = {name: start(node, fault if name in victims else "") for name, node in zip("ab", nodes, strict=True)}
    killed = [name for name in victims if drains[name].wait(30) == -signal.SIGKILL]
    assert "".join(killed) == victims or fault not in EVERY_DRAIN_COMES_TO
    drains |= {name: start(nodes["ab".index(name)]) for name in killed}
    assert {name: drain.wait(30) for name, drain in drains.items()} == {"a": 0, "b": 0}
    check_one_commit(nodes, 10)
