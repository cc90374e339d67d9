"""The live progress view: a rich panel on a terminal, an occasional plain line elsewhere.

It only reads what the job writes anyway (its files, or the api's streams), so the job does not know it is watched and
never waits for it.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from surefoot.cli.tail import EventTail, RankLogTail
from surefoot.cli.view_state import Note, ViewState
from surefoot.events import Event
from surefoot.spec import JobSpec

POLL_SECONDS = 0.25
PLAIN_LINE_SECONDS = 5.0
NUM_NOTES_SHOWN = 6
STYLES = {"good": "green", "bad": "bold red", "plain": ""}


class ViewMode(Enum):
    """How much is shown."""

    LIVE = "live"
    PLAIN = "plain"
    QUIET = "quiet"


class Source(Protocol):
    """Where a view learns what happens. One thread."""

    def events(self) -> list[Event]:
        """Return what happened since the last call; never waits."""

    def lines(self) -> list[tuple[int, str]]:
        """Return (rank, line) of what the ranks wrote since the last call; never waits."""


class FileSource:
    """The files of a job on this machine.

    Make it before the job starts: what its files hold by then belongs to earlier runs and is not shown.
    """

    def __init__(self, spec: JobSpec) -> None:
        self._events = EventTail(spec.events_path)
        self._logs = RankLogTail(spec.job_run_dir / "logs")

    def events(self) -> list[Event]:
        """Return what was appended; see `Source`."""
        return self._events.poll()

    def lines(self) -> list[tuple[int, str]]:
        """Return what was appended; see `Source`."""
        return self._logs.poll()


class JobView:
    """Follows one job and shows it. Used from one thread at a time.

    Args:
        spec: Of the job.
        console: Where to show it.
        mode: How much.
        source: Where to learn about it; None: its files, from now on.
    """

    def __init__(self, spec: JobSpec, console: Console, mode: ViewMode, source: Source | None = None) -> None:
        self.state = ViewState(spec.job, total_steps=spec.recipe.steps if spec.recipe else None)
        self._console = console
        self._live = mode is ViewMode.LIVE and console.is_terminal
        self._source = source or FileSource(spec)
        self._notes_shown = 0
        self._last_line_seconds = time.monotonic()

    def follow(self, stop: threading.Event) -> None:
        """Show the job until `stop` is set, then take in what came last. Blocks."""
        if not self._live:
            self._loop(stop, live=None)
            return
        with Live(console=self._console, auto_refresh=False, transient=False) as live:
            self._loop(stop, live)

    def _loop(self, stop: threading.Event, live: Live | None) -> None:
        stopping = False
        while not stopping:
            stopping = stop.wait(POLL_SECONDS)
            self._take_in()
            if live is not None:
                live.update(render(self.state, time.monotonic()), refresh=True)
            else:
                self._print_plain(final=stopping)

    def _take_in(self) -> None:
        for rank, line in self._source.lines():
            self._console.print(
                f"[dim]{escape(f'[rank {rank}]')}[/dim] {escape(line)}", highlight=False, soft_wrap=True
            )
        for event in self._source.events():
            self.state.apply(event)

    def _print_plain(self, *, final: bool) -> None:
        for note in self._new_notes():
            text = Text(f"{note.ts:%H:%M:%S} {note.text}", style=STYLES[note.style])
            self._console.print(text, soft_wrap=True)
        now = time.monotonic()
        if self.state.loss is not None and (final or now - self._last_line_seconds >= PLAIN_LINE_SECONDS):
            self._last_line_seconds = now
            self._console.print(plain_line(self.state, now), highlight=False, markup=False, soft_wrap=True)

    def _new_notes(self) -> list[Note]:
        num_new = min(self.state.num_notes - self._notes_shown, len(self.state.notes))
        self._notes_shown = self.state.num_notes
        return list(self.state.notes)[len(self.state.notes) - num_new :]


@contextmanager
def showing(spec: JobSpec, console: Console, mode: ViewMode, source: Source | None = None) -> Iterator[None]:
    """Show the job from a background thread while the body runs; leave the main thread to the body."""
    if mode is ViewMode.QUIET:
        yield
        return
    stop = threading.Event()
    view = JobView(spec, console, mode, source)
    thread = threading.Thread(target=view.follow, args=(stop,), name="surefoot-view", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def render(state: ViewState, now_monotonic: float) -> Panel:
    """Return the panel for a terminal."""
    grid = Table.grid(padding=(0, 2))
    for label, value in facts(state, now_monotonic):
        grid.add_row(Text(label, style="dim"), value)
    parts: list[Table | ProgressBar | Text] = [grid]
    if state.total_steps:
        parts.append(ProgressBar(total=state.total_steps, completed=state.step))
    newest = list(state.notes)[-NUM_NOTES_SHOWN:]
    parts += [Text(f"{note.ts:%H:%M:%S} {note.text}", style=STYLES[note.style]) for note in newest]
    return Panel(Group(*parts), title=f"surefoot: {escape(state.job)}", title_align="left", border_style="cyan")


def facts(state: ViewState, now_monotonic: float) -> list[tuple[str, str]]:
    """Return (label, value) rows: everything that the view shows apart from its notes."""
    rate = state.throughput()
    counts = f"{_counted(state.restarts, 'restart')}, {_counted(state.world_size, 'rank')}"
    preparing = state.prepared.stage if state.prepared else "starting"
    rows = [
        (
            "step",
            f"{state.step} / {state.total_steps or '?'}" if state.loss is not None else f"{preparing} ...",
        ),
        ("loss", _number(state.loss, ".4f")),
        ("throughput", f"{rate[0]:,.0f} {rate[1]}" if rate else "-"),
        ("gradient norm", _number(state.grad_norm, ".3f")),
        ("learning rate", _number(state.learning_rate, ".3g")),
        ("last durable checkpoint", _checkpoint_text(state, now_monotonic)),
        ("attempt", f"{state.attempt or '-'}  ({counts})"),
    ]
    if state.job_state is not None:
        rows.insert(0, ("state", str(state.job_state)))
    if state.saving is not None:
        cost = f"{state.saving.save_cost_seconds:.2f} s"
        rows.append(("saves", f"every {state.saving.interval_seconds:.0f} s (auto; one costs {cost})"))
    if state.storage_problem is not None:
        problem = state.storage_problem
        rows.append(("storage", f"fails ({problem.num_failures} times so far): {problem.reason}"))
    if state.stable_step is not None:
        rows.append(("stable checkpoint", f"step {state.stable_step}"))
    if state.incidents:
        rows.append(("incidents", _incidents_text(state)))
    return rows


def plain_line(state: ViewState, now_monotonic: float) -> str:
    """Return one line for a log."""
    values = dict(facts(state, now_monotonic))
    incidents = f"  incidents {values['incidents']}" if state.incidents else ""
    storage = f"  storage {values['storage']}" if state.storage_problem is not None else ""
    return (
        f"step {values['step']}  loss {values['loss']}  {values['throughput']}  "
        f"grad norm {values['gradient norm']}  lr {values['learning rate']}  "
        f"checkpoint {values['last durable checkpoint']}  attempt {values['attempt']}{storage}{incidents}"
    )


def _incidents_text(state: ViewState) -> str:
    counts = Counter(incident.state.lower() for incident in state.incidents.values())
    return ", ".join(f"{number} {name}" for name, number in sorted(counts.items()))


def _counted(number: int | None, noun: str) -> str:
    return f"{'?' if number is None else number} {noun}{'' if number == 1 else 's'}"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _checkpoint_text(state: ViewState, now_monotonic: float) -> str:
    age_seconds = state.checkpoint_age_seconds(now_monotonic)
    if state.committed is None or age_seconds is None:
        return "none yet" if state.restored_step is None else f"step {state.restored_step}, of an earlier run"
    return f"step {state.committed.step}, {age_seconds:.0f} s ago ({state.num_committed} so far)"
