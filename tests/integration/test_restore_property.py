"""Whatever is killed or harmed, a start goes on from the newest good state on the lineage, bit for bit (DESIGN 5).

Ranks, drains, staging memory and files are real (see `helpers.toy_history`; the oracle is `helpers.toy_oracle`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from helpers.forked import Forge
from helpers.toy_history import History
from helpers.toy_plan import DAMAGES, DROPS, ENDINGS, ORDERS, Damage, Drop, Operation, Prune, Start, Touch

SOURCE = Path(__file__).parents[2] / "shared" / "src" / "surefoot"


def fault_points(*paths: str) -> list[str]:
    """Return the fault points that the source has now."""
    files = [file for path in paths for file in sorted((SOURCE / path).rglob("*.py")) or [SOURCE / path]]
    return sorted({name for file in files for name in re.findall(r'reach\("([\w.]+)"\)', file.read_text())})


IN_RANK = [*fault_points("sdk"), *fault_points("checkpoint/staging.py")]
IN_PRUNE = fault_points("checkpoint/prune.py", "checkpoint/store.py")
NOT_IN_DRAIN = ("staging.filling", "staging.copied", "export.", "import.", "marks.")
IN_DRAIN = [name for name in fault_points("checkpoint") if not name.startswith(NOT_IN_DRAIN)]


@st.composite
def plans(draw: st.DrawFn, points: Sequence[str], actions: Sequence[str]) -> str:
    point, action = draw(st.sampled_from(points)), draw(st.sampled_from(actions))
    return f"{point}={action}@{draw(st.integers(1, 9))}"


STARTS = st.builds(
    Start,
    world_size=st.sampled_from([1, 1, 2]),
    num_steps=st.integers(1, 8),
    save_every=st.integers(1, 4),
    num_buffers=st.sampled_from([3, 2, 1]),
    every_step=st.booleans(),
    rank_fault=st.just("") | plans(IN_RANK, ["kill"]),
    faulty_rank=st.integers(0, 1),
    kill_after=st.none() | st.integers(1, 8),
    drain_fault=st.just("") | plans(IN_DRAIN, ["kill", "kill", "eio", "enospc"]),
    roll_back=st.none() | st.tuples(st.integers(0, 6), st.integers(0, 4)),
    ending=st.sampled_from(ENDINGS),
    from_seed=st.sampled_from([False] * 7 + [True]),
    keep_last=st.none() | st.integers(1, 3),
)
DAMAGE = st.builds(
    Damage,
    checkpoint=st.sampled_from([0, 0, 0, 1, 2]),
    file=st.integers(0, 4),
    how=st.sampled_from(DAMAGES),
    where=st.floats(0, 1),
)
HARM = (
    DAMAGE
    | DAMAGE
    | st.builds(Drop, what=st.sampled_from(DROPS), buffer=st.integers(0, 5))
    | st.builds(Touch, order=st.sampled_from(ORDERS))
    | st.builds(Prune, keep_last=st.integers(1, 3), faults=st.just("") | plans(IN_PRUNE, ["kill"]))
)


@st.composite
def operations(draw: st.DrawFn, max_starts: int) -> list[Operation]:
    """Starts, the first one undisturbed as a rule, with up to two harms between two of them."""
    drawn: list[Operation] = []
    for _ in range(draw(st.integers(1, max_starts))):
        drawn += [draw(STARTS), *draw(st.lists(HARM, max_size=2))]
    return drawn


@pytest.fixture
def run(toy_forge: Forge, tmp_path: Path) -> Callable[[Sequence[Operation]], None]:
    """Carry out operations in a new job, and end with a start that nothing disturbs."""
    num_jobs = 0

    def run(drawn: Sequence[Operation]) -> None:
        nonlocal num_jobs
        num_jobs += 1
        history = History(tmp_path / str(num_jobs), toy_forge)
        try:
            history.do(*drawn, Start(num_steps=1))
            history.check_end()
        finally:
            history.close()

    return run


KILLED_IN_THE_COPY = [
    Start(world_size=2, num_steps=6, rank_fault="staging.copied=kill@5", faulty_rank=1, ending="is killed"),
    Start(num_steps=3, kill_after=2, ending="stays"),
]
NOTHING_LEFT = [Start(num_steps=2), Damage(checkpoint=0, file=1, how="flip")]
FALLS_BACK_TWICE = [
    Start(num_steps=6, save_every=2),
    Start(num_steps=3, save_every=2),
    Damage(checkpoint=0, file=1, how="flip"),
    Damage(checkpoint=0, file=0, how="truncate"),
    Touch("reversed"),
]
ROLLED_BACK_AND_KILLED = [
    Start(num_steps=3),
    Start(num_steps=6, roll_back=(4, 1), rank_fault="command.claimed=kill", ending="is killed"),
    Drop("folder"),
]
NO_BUFFER_FREE = [
    # Step 4 waits for storage, so the other buffer keeps step 5 until that is over.
    Start(num_steps=3),
    Start(
        num_steps=9,
        save_every=4,
        num_buffers=2,
        drain_fault="store.write.opened=eio",
        rank_fault="staging.filling=kill@3",
        ending="stays",
    ),
]
HALF_WRITTEN = [
    Start(num_steps=6, save_every=1),
    Start(num_steps=2, save_every=1),
    Start(num_steps=6, save_every=1, drain_fault="drain.shard_written=kill@3", kill_after=5, ending="is killed"),
    Drop("folder"),
    Prune(keep_last=1, faults="prune.moved=kill"),
]

FEW = settings(
    max_examples=3,
    deadline=None,
    # Not made smaller: that takes longer than to read the story of a failure, which depends on time besides.
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
MANY = settings(FEW, max_examples=150)


@pytest.mark.chaos
@pytest.mark.timeout(120)
@example(KILLED_IN_THE_COPY)
@example(NOTHING_LEFT)
@example(FALLS_BACK_TWICE)
@example(ROLLED_BACK_AND_KILLED)
@example(NO_BUFFER_FREE)
@example(HALF_WRITTEN)
@given(operations(max_starts=3))
@FEW
def test_the_newest_good_state_is_restored_bit_for_bit(run, drawn):
    run(drawn)


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.timeout(1800)
@given(operations(max_starts=6))
@MANY
def test_the_newest_good_state_is_restored_bit_for_bit_at_length(run, drawn):
    run(drawn)
