"""What `bench.checkpoint` makes of what it recorded."""

from __future__ import annotations

import math

import pytest

from bench.checkpoint_figures import WARM_UP_SAVES, Results, Run, SaveRecord, costs, growth, row
from bench.checkpoint_report import growth_row, save_rows, save_targets, throughput_rows
from bench.checkpoint_size import model_spec

STEP_SECONDS = 0.5


def run_with(stall=0.1, slower=0.2, durable=0.8, num_saves=3, every=8):
    """A loop whose saves stall it, and that takes so much longer in the step after."""
    ends, saves, now = [], [], 100.0
    for step in range(1, every * (num_saves + 1) + 1):
        now += STEP_SECONDS
        ends.append(now)
        if step % every == 0 and len(saves) < num_saves:
            saves.append(SaveRecord(step, now, stall, now + durable))
            now += stall + slower
    return Run(ends, saves)


def test_lost_time_is_the_stall_and_the_slower_steps_after_it():
    found = costs(run_with(stall=0.1, slower=0.2))
    assert len(found) == 2  # the first one warms up
    for save in found:
        assert save.lost_seconds == pytest.approx(0.3)
        assert (save.stall_seconds, save.step_seconds) == (0.1, pytest.approx(STEP_SECONDS))
        assert save.durable_seconds == pytest.approx(0.8)


def test_a_save_that_costs_nothing_loses_nothing():
    assert [save.lost_seconds for save in costs(run_with(stall=0.0, slower=0.0))] == pytest.approx([0.0, 0.0])


def test_what_is_lost_in_the_step_after_the_one_in_which_it_became_durable_counts():
    run = run_with(stall=0.0, slower=0.0, durable=0.8)
    save = run.saves[1]
    # durable in the second step after the save; the third is 0.4 s longer
    later = [end + 0.4 if end > save.called_at + 3 * STEP_SECONDS - 0.01 else end for end in run.ends]
    assert costs(Run(later, run.saves))[0].lost_seconds == pytest.approx(0.4)


@pytest.mark.parametrize(
    "run",
    [
        run_with(durable=8 * STEP_SECONDS),  # it takes as long as from one save to the next
        Run(run_with().ends[:-8], run_with().saves),  # the loop ends with the save
    ],
)
def test_saves_too_close_to_others_or_to_the_end_are_left_out_and_counted(run):
    assert len(costs(run)) < 2
    assert row("any", 1, [run], 0.0)["saves not counted"] == 2 - len(costs(run))


def test_growth_is_from_the_end_of_the_warm_up_to_the_highest():
    since = [(40_000_000, 6_000_000), (45_000_000, 8_000_000), (42_000_000, 7_000_000)]
    samples = [*[(10, 5)] * (WARM_UP_SAVES - 1), *since]
    assert growth(samples) == (5.0, 2.0)


@pytest.mark.parametrize("wanted", [1_000_000, 4_000_000, 20_000_000, 124_000_000, 350_000_000])
def test_the_model_is_about_as_large_as_asked_for(wanted):
    assert model_spec(wanted).num_parameters() == pytest.approx(wanted, rel=0.5)


def test_the_model_of_124_million_is_that_of_gpt_2():
    spec = model_spec(124_000_000)
    assert (spec.hidden_size, spec.num_hidden_layers, spec.vocab_size) == (768, 12, 50257)
    assert spec.num_parameters() == pytest.approx(124e6, rel=0.01)


def results():
    """Surefoot stalls 0.1 s and loses 0.15 s; the best of the others loses 0.6 s."""
    runs = {}
    for ranks in (1, 2):
        runs[ranks, "bare"] = [Run([1.0], [], memory_bytes=2e9)]
        for name, slower in (("torch.save", 1.0), ("dcp.save", 0.5)):
            runs[ranks, name] = [run_with(0.1, slower, durable=1.6)]
        mine = run_with(0.1, 0.05, durable=0.6)
        mine.memory_bytes, mine.held_bytes = 5e9, 4.9e9
        mine.loads = {"staging": 0.1, "storage": 0.6}
        mine.throughput = {"verify": 2e9, "drain, beside training": 2e9, "drain, nothing beside it": 3e9}
        runs[ranks, "surefoot"] = [mine]
    floors = {"bytes": 1.5e9, "copy into staging": 0.06, "copy out of staging": 0.06, "write and fsync": 0.5}
    return Results(runs, [floors | {"read": 0.4}], (3.0, 50.0), 200, 1_500_000_000)


def test_the_targets_are_those_of_the_issue():
    rows = save_rows(results())
    one = {t.name: t for t in save_targets(rows, results(), 1)}
    assert {name: (target.value, target.met) for name, target in one.items()} == {
        "1 rank: lost, to the best of the others": (pytest.approx(0.25), True),
        "1 rank: lost seconds per 1.5 GB": (pytest.approx(0.15), True),
        "1 rank: durable, to the O_DIRECT write and fsync": (pytest.approx(1.2), True),
        "1 rank: extra RAM, to buffers x state": (pytest.approx(1.0), True),
        "1 rank: extra RAM held before the first save, as a part of the peak": (pytest.approx(2.9 / 3), True),
        "1 rank: restore from staging, to the memory copy": (pytest.approx(0.1 / 0.06), True),
    }
    two = {t.name: (t.value, t.limit) for t in save_targets(rows, results(), 2)}
    assert two["2 ranks: lost, to the best of the others"] == (pytest.approx(0.25), 0.75)
    assert two["2 ranks: durable, to the best of the others"] == (pytest.approx(0.375), 0.5)
    assert [(t.value, t.met) for t in growth_row(results())[1]] == [(3.0, True), (50.0, False)]


def test_throughput_is_beside_the_floor_it_works_against():
    rows = {(r["part"], r["ranks"]): r for r in throughput_rows(results(), save_rows(results()))}
    copy = rows["snapshot copy", 1]
    assert (copy["GB/s"], copy["floor GB/s"]) == (pytest.approx(15.0), pytest.approx(25.0))
    assert rows["restore from storage", 1]["part of the floor"] == pytest.approx(0.4 / 0.6)
    # both ranks load everything
    assert rows["restore from storage", 2]["part of the floor"] == pytest.approx(2 * 0.4 / 0.6)


def test_without_peers_there_is_nothing_to_compare_with():
    alone = results()
    for key in [key for key in alone.runs if key[1] not in ("bare", "surefoot")]:
        del alone.runs[key]
    assert math.isnan(save_rows(alone)[0]["lost s, to the best of the others"])
