"""Cases C2 and C3: what retention decides, for all histories and policies."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.checkpoint.ids import CheckpointId
from surefoot.checkpoint.retention import CheckpointFacts, decide, drain_prunes
from surefoot.spec import RetentionSpec


def at(step: int, attempt: int = 1, **known: object) -> CheckpointFacts:
    return replace(CheckpointFacts(CheckpointId(attempt, step)), **known)  # type: ignore[arg-type]


def steps_kept(facts: list[CheckpointFacts], policy: RetentionSpec, *protected: CheckpointId) -> list[int]:
    gone = {id_ for id_, _ in decide(facts, policy, protected)}
    return [f.id.step for f in facts if f.id not in gone]


ONE = RetentionSpec(keep_last=1)


@st.composite
def histories(draw: st.DrawFn) -> list[CheckpointFacts]:
    ids = draw(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 60)), unique=True, max_size=14))
    losses = st.none() | st.sampled_from([1.0, 2.0, float("nan"), float("inf")]) | st.floats(0, 9)
    return [
        CheckpointFacts(
            CheckpointId(*id_),
            is_current=draw(st.integers(0, 3)) > 0,
            is_stable=draw(st.booleans()),
            is_pinned=draw(st.integers(0, 7)) == 0,
            is_candidate=draw(st.booleans()),
            is_verified=draw(st.booleans()),
            is_damaged=draw(st.integers(0, 7)) == 0,
            loss=draw(losses),
        )
        for id_ in ids
    ]


policies = st.builds(
    RetentionSpec,
    keep_last=st.none() | st.integers(1, 4),
    keep_every_steps=st.none() | st.integers(1, 30),
    keep_best=st.integers(0, 3),
    keep_stable=st.integers(2, 4),
)


@settings(max_examples=30)
@given(histories(), policies)
def test_what_training_could_go_on_from_never_goes(facts: list[CheckpointFacts], policy: RetentionSpec) -> None:
    """Case C2: the newest stays, the newest that was verified stays, two STABLE ones stay, pins stay."""
    gone = {id_ for id_, _ in decide(facts, policy)}
    good = sorted(f.id for f in facts if f.is_current and not f.is_damaged)
    of = {f.id: f for f in facts}
    assert not gone & set(good[-1:])
    assert not gone & set([i for i in good if of[i].is_verified][-1:])
    assert not gone & set([i for i in good if of[i].is_stable][-2:])
    assert not gone & {f.id for f in facts if f.is_pinned or f.is_damaged}
    if not good:
        assert not gone


@settings(max_examples=30)
@given(histories(), policies, st.randoms())
def test_the_order_in_which_they_are_listed_says_nothing(
    facts: list[CheckpointFacts], policy: RetentionSpec, order: random.Random
) -> None:
    """Case C3: only the ids do."""
    shuffled = order.sample(facts, len(facts))
    assert decide(shuffled, policy) == decide(facts, policy)


@settings(max_examples=30)
@given(histories(), policies)
def test_removing_what_was_decided_changes_no_later_decision(
    facts: list[CheckpointFacts], policy: RetentionSpec
) -> None:
    gone = [id_ for id_, _ in decide(facts, policy)]
    for num_removed in range(len(gone) + 1):  # cut off anywhere
        left = [f for f in facts if f.id not in gone[:num_removed]]
        assert [id_ for id_, _ in decide(left, policy)] == gone[num_removed:]


@settings(max_examples=30)
@given(histories(), policies, policies, st.data())
def test_more_rules_pins_and_promotions_never_remove_more(
    facts: list[CheckpointFacts], policy: RetentionSpec, other: RetentionSpec, data: st.DataObject
) -> None:
    gone = {id_ for id_, _ in decide(facts, policy)}
    last = None if None in (policy.keep_last, other.keep_last) else max(policy.keep_last or 0, other.keep_last or 0)
    more = policy.model_copy(
        update={
            "keep_last": last,
            "keep_every_steps": policy.keep_every_steps or other.keep_every_steps,
            "keep_best": max(policy.keep_best, other.keep_best),
            "keep_stable": max(policy.keep_stable, other.keep_stable),
        }
    )
    assert {id_ for id_, _ in decide(facts, more)} <= gone
    if facts:
        chosen = data.draw(st.sampled_from(facts))
        pinned = [replace(f, is_pinned=True) if f == chosen else f for f in facts]
        assert {id_ for id_, _ in decide(pinned, policy)} == gone - {chosen.id}
        assert {id_ for id_, _ in decide(facts, policy, {chosen.id})} == gone - {chosen.id}


@settings(max_examples=30)
@given(histories(), policies, st.data())
def test_each_rule_keeps_what_it_says(facts: list[CheckpointFacts], policy: RetentionSpec, data: st.DataObject) -> None:
    gone = {id_ for id_, _ in decide(facts, policy)}
    good = sorted((f for f in facts if f.is_current and not f.is_damaged), key=lambda f: f.id)
    assert not gone & {f.id for f in (good if policy.keep_last is None else good[-policy.keep_last :])}
    finite = [f for f in good if f.loss is not None and f.loss == f.loss]
    for f in finite:
        better = [o for o in finite if o.loss < f.loss or (o.loss == f.loss and o.id > f.id)]  # type: ignore[operator]
        if len(better) < policy.keep_best:
            assert f.id not in gone
    for f in good:
        if f.id in gone:
            assert sum(o.is_stable for o in good if o.id >= f.id) >= policy.keep_stable or not f.is_stable


def test_only_the_last_stay() -> None:
    """Case C2, keep = 1: one stays."""
    assert steps_kept([at(10), at(20), at(30)], ONE) == [30]
    assert steps_kept([at(10), at(20), at(30)], RetentionSpec(keep_last=2)) == [20, 30]
    assert steps_kept([at(10), at(20), at(30)], RetentionSpec(keep_last=None)) == [10, 20, 30]


def test_the_first_after_each_multiple_stays_for_ever() -> None:
    facts = [at(s) for s in (90, 110, 130, 201, 299, 300, 410, 420)]
    assert steps_kept(facts, RetentionSpec(keep_last=1, keep_every_steps=100)) == [110, 201, 300, 410, 420]


def test_the_best_by_loss_stay() -> None:
    losses = {10: 3.0, 20: 1.0, 30: float("nan"), 40: None, 50: 2.0, 60: 1.0, 70: 9.0}
    facts = [at(step, loss=loss) for step, loss in losses.items()]
    assert steps_kept(facts, RetentionSpec(keep_last=1, keep_best=2)) == [20, 60, 70]
    assert steps_kept(facts, RetentionSpec(keep_last=1, keep_best=1)) == [60, 70]  # of equal ones the newer


def test_what_was_left_behind_goes_unless_it_is_pinned() -> None:
    left = [at(80, is_current=False), at(90, is_current=False, is_pinned=True, loss=0.1)]
    assert steps_kept([*left, at(60)], RetentionSpec(keep_best=3)) == [90, 60]
    (gone,) = decide([*left, at(60)], RetentionSpec())
    assert gone[1] == "abandoned: training went on from an older checkpoint"


def test_while_nothing_current_is_committed_everything_stays() -> None:
    assert decide([at(80, is_current=False), at(90, is_current=False)], ONE) == []
    assert decide([at(80, is_current=False), at(90, is_damaged=True)], ONE) == []


def test_the_oldest_that_may_become_stable_stays_until_it_is() -> None:
    """Or else nothing would live long enough where probation takes longer than the last ones span."""
    facts = [at(s, is_candidate=True) for s in (10, 20, 30, 40)]
    assert steps_kept(facts, ONE) == [10, 40]
    promoted = [replace(facts[0], is_candidate=False, is_stable=True), *facts[1:]]
    assert steps_kept(promoted, ONE) == [10, 20, 40]
    unfit = [replace(facts[0], is_candidate=False), *facts[1:]]
    assert steps_kept(unfit, ONE) == [20, 40]


def test_a_damaged_one_counts_for_nothing_and_is_left_to_quarantine() -> None:
    """Case C2: with keep = 1 a damaged newest one does not push out the good one before it."""
    assert steps_kept([at(10), at(20), at(30, is_damaged=True)], ONE) == [20, 30]


def test_one_that_nobody_has_read_yet_does_not_push_out_one_that_was() -> None:
    assert steps_kept([at(10, is_verified=True), at(20), at(30)], ONE) == [10, 30]
    assert steps_kept([at(10, is_verified=True), at(20), at(30, is_verified=True)], ONE) == [30]


def test_the_reason_names_every_rule_of_the_policy() -> None:
    policy = RetentionSpec(keep_last=1, keep_every_steps=1000, keep_best=3)
    ((_, reason),) = decide([at(10), at(20)], policy)
    assert reason == (
        "not among the last 1, not the first at a multiple of 1000 steps, not among the best 3 by loss, "
        "not among the newest 2 STABLE, not pinned"
    )


@pytest.mark.parametrize(("environment", "expected"), [({}, True), ({"SUREFOOT_WRITER_PRUNES": "1"}, False)])
def test_where_a_writer_service_prunes_the_drain_does_not(environment: dict[str, str], expected: bool) -> None:
    assert drain_prunes(environment) is expected
