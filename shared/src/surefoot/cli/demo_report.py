"""What the demo found, checked line by line: by what the job left on disk, and by the incidents the API tells of."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from surefoot.checkpoint.attempts import AttemptLog, AttemptRecord, Source
from surefoot.checkpoint.catalog import list_committed
from surefoot.checkpoint.store import LocalStore
from surefoot.cli.checkpoints import Verdict, verify_job
from surefoot.cli.demo_job import Kill
from surefoot.cli.demo_stack import DemoStack
from surefoot.cli.output import mebibytes
from surefoot.events import AnomalyKind, CheckpointCommitted, Event, IncidentState, JobState, StepCompleted, read_events
from surefoot.spec import JobSpec

NUM_LAST_STEPS = 20
NATS_WANTED = 2.5


@dataclass(frozen=True)
class Check:
    """One thing that had to happen."""

    name: str
    passed: bool
    detail: str


@dataclass(frozen=True)
class Losses:
    """Loss of the steps on the final lineage, in nats per token."""

    num_steps: int
    first: float
    last: float
    mean_of_last: float

    @property
    def nats_below_first(self) -> float:
        """How far the mean of the last steps is below the first step."""
        return self.first - self.mean_of_last


@dataclass(frozen=True)
class DemoReport:
    """The outcome of a demo."""

    checks: tuple[Check, ...]
    kill: Kill | None
    incidents: tuple[dict[str, Any], ...]
    """As the API gives them, with their actions, oldest first."""
    losses: Losses | None
    num_committed: int
    """Checkpoints that became durable, by events."""
    verdicts: tuple[Verdict, ...]
    attempts: tuple[AttemptRecord, ...]
    tokens_per_second: float | None
    work_dir: str
    log_path: str

    @property
    def passed(self) -> bool:
        """Return whether everything happened."""
        return all(check.passed for check in self.checks)

    def to_json(self) -> str:
        """Return the report for scripts."""
        kill, losses = self.kill, self.losses
        document = {
            "passed": self.passed,
            "checks": [asdict(check) for check in self.checks],
            "kill": None if kill is None else asdict(kill) | {"steps_lost": kill.steps_lost},
            "incidents": list(self.incidents),
            "losses": None if losses is None else asdict(losses) | {"nats_below_first": losses.nats_below_first},
            "num_checkpoints_committed": self.num_committed,
            "checkpoints": [asdict(verdict) for verdict in self.verdicts],
            "attempts": [record.model_dump(mode="json") for record in self.attempts],
            "tokens_per_second": self.tokens_per_second,
            "work_dir": self.work_dir,
        }
        return json.dumps(document, indent=2) + "\n"


def build_report(
    spec: JobSpec,
    stack: DemoStack,
    *,
    outcome: dict[str, Any],
    kill: Kill | None,
    problem: str | None,
    incidents: list[dict[str, Any]],
    leftovers: list[str],
) -> DemoReport:
    """Read what an ended job left and check it. Reads every byte of its checkpoints.

    Args:
        spec: Of the job.
        stack: The services, stopped.
        outcome: The job as the API told of it last.
        kill: What the kill cost, None when it failed.
        problem: Why it failed.
        incidents: As the API gave them, oldest first.
        leftovers: What was still there when everything had stopped.
    """
    folder = spec.storage / spec.job
    store = LocalStore(folder)
    events, _ = read_events(spec.events_path)
    verdicts = verify_job(folder, list_committed(store))
    attempts = tuple(AttemptLog(store).read_all().values())
    losses = losses_of(events)
    checks = (
        _check_finished(outcome, losses, spec.recipe_or_defaults.steps),
        _check_kill(kill, problem, attempts),
        _check_incident("the killed rank was healed", "rank_failure", "restart", incidents),
        _check_incident("the blown-up update was healed", None, "rollback", incidents),
        _check_losses(losses),
        _check_checkpoints(verdicts),
        _check_leftovers(leftovers, stack.exit_code),
    )
    return DemoReport(
        checks=checks,
        kill=kill,
        incidents=tuple(incidents),
        losses=losses,
        num_committed=sum(isinstance(event, CheckpointCommitted) for event in events),
        verdicts=tuple(verdicts),
        attempts=attempts,
        tokens_per_second=tokens_per_second(events),
        work_dir=str(stack.home.parent),
        log_path=str(stack.log_path),
    )


def losses_of(events: list[Event]) -> Losses | None:
    """Return the losses of the final lineage: a step done again counts as its last attempt did it."""
    steps = [event for event in events if isinstance(event, StepCompleted)]
    by_step = {event.step: event.loss for event in sorted(steps, key=lambda event: event.attempt or 0)}
    if not by_step:
        return None
    values = [by_step[step] for step in sorted(by_step)]
    last = values[-NUM_LAST_STEPS:]
    return Losses(len(values), values[0], values[-1], sum(last) / len(last))


def tokens_per_second(events: list[Event]) -> float | None:
    """Return the median rate of a step, None when steps do not tell their tokens."""
    rates = sorted(
        event.num_tokens / max(event.step_seconds)
        for event in events
        if isinstance(event, StepCompleted) and event.num_tokens and event.step_seconds and max(event.step_seconds) > 0
    )
    return rates[len(rates) // 2] if rates else None


def print_report(report: DemoReport, console: Console) -> None:
    """Print figures, then a line for each check."""
    console.rule("report")
    for label, value in _figures(report):
        console.print(f"{label:<38} {value}", highlight=False, markup=False, soft_wrap=True)
    for incident in report.incidents:
        _print_incident(incident, console)
    for check in report.checks:
        word = "[green]PASS[/green]" if check.passed else "[bold red]FAIL[/bold red]"
        console.print(f"{word}  {escape(check.name)}: {escape(check.detail)}", highlight=False, soft_wrap=True)
    log = Path(report.log_path)
    if not report.passed and log.exists():
        lines = log.read_text(errors="replace").splitlines()[-30:]
        console.print(f"last lines of {log}:", *lines, sep="\n", highlight=False, markup=False)


def _print_incident(incident: dict[str, Any], console: Console) -> None:
    """Print what was seen, the numbers, what was done and why, what it cost, and how it ended."""
    actions = [f"{action['kind']} ({action['state']}): {action['reason']}" for action in incident["actions"]]
    lines = [
        ("seen", incident["cause"]),
        ("done", "; ".join(actions) or "nothing"),
        ("next completed step after", _cost(incident["recovery_seconds"], "{:.3f} s")),
        ("steps lost", _cost(incident["steps_lost"], "{}")),
        ("outcome", f"{incident['state']}. {incident['outcome']}"),
    ]
    title = f"incident {incident['id']}: {incident['kind']}, {incident['severity']}, from step {incident['onset_step']}"
    console.print(title, style="bold", highlight=False, markup=False)
    for label, text in lines:
        console.print(f"  {label:<26} {' '.join(text.split())}", highlight=False, markup=False, soft_wrap=True)


def _cost(value: float | None, form: str) -> str:
    return "not known" if value is None else form.format(value)


def _figures(report: DemoReport) -> list[tuple[str, str]]:
    figures: list[tuple[str, str]] = []
    if report.kill is not None:
        figures.append(("kill to next completed step, all ranks", f"{report.kill.recovery_seconds:.3f} s"))
        figures.append(("steps lost", str(report.kill.steps_lost)))
    if report.losses is not None:
        losses = report.losses
        figures.append(("first loss", f"{losses.first:.4f}"))
        figures.append(("last loss", f"{losses.last:.4f}"))
        below = f"{losses.nats_below_first:.2f} nats below the first"
        figures.append((f"mean of last {NUM_LAST_STEPS}", f"{losses.mean_of_last:.4f} ({below})"))
    if report.tokens_per_second is not None:
        figures.append(("throughput", f"{report.tokens_per_second:,.0f} tokens/s"))
    figures.append(("checkpoints committed", str(report.num_committed)))
    figures += [(f"attempt {record.attempt}", _attempt_text(record)) for record in report.attempts]
    size = mebibytes(sum(path.stat().st_size for path in Path(report.work_dir).rglob("*") if path.is_file()))
    figures.append(("kept until the next demo", f"{report.work_dir} ({size})"))
    return figures


def _attempt_text(record: AttemptRecord) -> str:
    start = record.starts_from
    return f"from step {start.step} ({start.source}), {record.world_size} ranks: {record.cause}"


def _check_finished(outcome: dict[str, Any], losses: Losses | None, steps: int) -> Check:
    done = losses.num_steps if losses else 0
    # Events of the steps just before the kill can die with rank 0; the state is the job's own word.
    detail = f"{outcome['state']}, {done} of {steps} steps seen"
    return Check("the job finished", outcome["state"] == JobState.SUCCEEDED and done > 0, detail)


def _check_incident(name: str, kind: str | None, action: str, incidents: list[dict[str, Any]]) -> Check:
    """Check that there is an incident of that kind (None: any anomaly), healed by that action."""
    kinds = {kind} if kind else set(AnomalyKind)
    found = [row for row in incidents if row["kind"] in kinds and action in {a["kind"] for a in row["actions"]}]
    if not found:
        return Check(name, False, f"no incident of that kind was answered with {action}")
    bad = [row for row in found if row["state"] != IncidentState.HEALED]
    shown = (bad or found)[-1]
    after = _cost(shown["recovery_seconds"], "{:.3f} s to the next step")
    return Check(name, not bad, f"incident {shown['id']} ({shown['kind']}) {shown['state']}; {after}")


def _check_kill(kill: Kill | None, problem: str | None, attempts: tuple[AttemptRecord, ...]) -> Check:
    name = "training went on after the kill"
    if kill is None:
        return Check(name, False, problem or "no rank was killed")
    after = next((record for record in attempts if record.attempt > kill.attempt), None)
    if after is None or after.starts_from.source is Source.SEED:
        return Check(name, False, "no attempt after the kill started from a snapshot or a checkpoint")
    return Check(name, True, f"rank {kill.rank} (pid {kill.pid}); attempt {after.attempt} {_attempt_text(after)}")


def _check_losses(losses: Losses | None) -> Check:
    name = f"the loss fell by {NATS_WANTED} nats"
    if losses is None:
        return Check(name, False, "no step was completed")
    fell = losses.nats_below_first
    return Check(name, fell >= NATS_WANTED, f"{losses.first:.3f} to {losses.mean_of_last:.3f}, {fell:.3f} nats")


def _check_checkpoints(verdicts: list[Verdict]) -> Check:
    damaged = [verdict for verdict in verdicts if verdict.problem is not None]
    detail = f"{len(verdicts) - len(damaged)} of {len(verdicts)} verified"
    if damaged:
        detail = f"{detail}; {damaged[0].problem}"
    return Check("every kept checkpoint is good", bool(verdicts) and not damaged, detail)


def _check_leftovers(leftovers: list[str], exit_code: int | None) -> Check:
    detail = ", ".join(leftovers) or "no process, no staging memory"
    if exit_code != 0:
        detail = f"{detail}; the services stopped with exit status {exit_code}"
    return Check("nothing left behind", not leftovers and exit_code == 0, detail)
