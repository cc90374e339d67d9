"""`surefoot up | down | status`, `serve`, `db upgrade`, `doctor`: the stack on this machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from surefoot.cli.output import JsonOption, print_json, print_table
from surefoot.embedded import stack as stacks
from surefoot.embedded.doctor import Verdict, examine
from surefoot.embedded.layout import Layout
from surefoot.embedded.log_files import tail
from surefoot.embedded.serve import serve
from surefoot.embedded.stack import Ports, StackFailed
from surefoot.embedded.stack_file import ServiceState, Stack, StackState, read_stack, running_stack, supervisor_pid
from surefoot.embedded.status import StackReport, report
from surefoot.errors import EXIT_FAILED

HomeOption = Annotated[
    Path, typer.Option("--home", envvar="SUREFOOT_HOME", help="Folder of the stack: run, logs, db, checkpoints.")
]
DEFAULT_HOME = Path(".surefoot")
LOG_LINES = 12


def register(app: typer.Typer, epilog: str) -> None:
    """Add the commands.

    Args:
        app: To this.
        epilog: What the exit statuses mean.
    """
    for name, function in (("up", up), ("down", down), ("status", status), ("serve", serve_command)):
        app.command(name, epilog=epilog)(function)
    app.command("doctor", epilog=epilog)(doctor)
    database = typer.Typer(no_args_is_help=True, help="The database of the services.")
    database.command("upgrade", epilog=epilog)(upgrade)
    app.add_typer(database, name="db")


def up(
    home: HomeOption = DEFAULT_HOME,
    api_port: Annotated[int | None, typer.Option(min=1, max=65535, help="Port of the api.")] = None,
    gateway_port: Annotated[int | None, typer.Option(min=1, max=65535, help="Port of the live page.")] = None,
    redis_port: Annotated[int | None, typer.Option(min=1, max=65535, help="Port of the server.")] = None,
    foreground: Annotated[bool, typer.Option("--foreground", help="Stay, and stop with Ctrl-C.")] = False,
) -> None:
    """Start the server and all services on this machine, on loopback ports; returns when all are ready."""
    layout = Layout(home)
    if supervisor_pid(home) is not None:
        _tell_running(report(home))
        return
    plan = stacks.make_plan(layout, Ports(api_port, gateway_port, redis_port))
    teller = _Teller()
    if foreground:
        code = stacks.run_in_foreground(plan, teller.tell)
        _finish(layout, read_stack(home), code)
    try:
        stack = stacks.start(plan, teller.tell)
    except StackFailed:
        _tell_failure(layout)
        raise
    _tell_urls(stack)


def down(home: HomeOption = DEFAULT_HOME) -> None:
    """Save the running jobs and stop everything. What is staged is made durable and its memory freed."""
    layout = Layout(home)
    if running_stack(home) is None:
        print(f"no stack runs in {layout.home}")
    else:
        print("stopping; running jobs are saved first", flush=True)
    _finish(layout, stacks.stop(home), 0)


def status(home: HomeOption = DEFAULT_HOME, as_json: JsonOption = False) -> None:
    """Show the services. Exit status 0 when all is well with all of them, 1 otherwise."""
    found = report(home)
    if as_json:
        print_json(_as_data(found))
    elif found.stack is None:
        print(f"no stack runs in {home.absolute()}; start one with `surefoot up`")
    else:
        _print_status(found)
    raise typer.Exit(0 if found.healthy else EXIT_FAILED)


def serve_command(name: Annotated[str, typer.Argument(help="E.g. detector.")]) -> None:
    """Run one service in the foreground, until SIGTERM. Settings come from SUREFOOT_* variables."""
    raise typer.Exit(serve(name))


def upgrade(
    database_url: Annotated[
        str | None,
        typer.Option(envvar="SUREFOOT_DATABASE_URL", help="An SQLAlchemy URL, sqlite or postgresql+psycopg."),
    ] = None,
) -> None:
    """Make the tables, or bring them to this version."""
    from surefoot.catalogue import migrate
    from surefoot.settings import CommonSettings

    url = database_url or CommonSettings().database_url
    print("the database is upgraded" if migrate.upgrade(url) else "the database is up to date")


def doctor(home: HomeOption = DEFAULT_HOME, as_json: JsonOption = False) -> None:
    """Look at this machine for what Surefoot needs. Exit status 1 when something does not work."""
    findings = examine(home)
    if as_json:
        print_json([finding._asdict() for finding in findings])
    else:
        print_table(["", "CHECK", "FOUND"], [[f.verdict, f.check, f.found] for f in findings])
        for finding in findings:
            if finding.advice:
                print(f"{finding.check}: {finding.advice}")
    if any(finding.verdict is Verdict.FAIL for finding in findings):
        raise typer.Exit(EXIT_FAILED)


class _Teller:
    """Says once of each service that it is ready."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def tell(self, stack: Stack) -> None:
        for name, service in stack.services.items():
            if name not in self._told and service.state in (ServiceState.READY, ServiceState.DONE):
                self._told.add(name)
                print(f"  {name:<14}{'done' if service.state is ServiceState.DONE else 'ready'}", flush=True)
        if stack.state is StackState.RUNNING and stack.state not in self._told:
            self._told.add(stack.state)


def _tell_urls(stack: Stack) -> None:
    print(f"api        {stack.urls.get('api', '?')}/api/v1   (token in {stack.token_file})")
    print(f"live page  {stack.urls.get('gateway', '?')}/")


def _tell_running(found: StackReport) -> None:
    if found.stack is None:
        raise StackFailed("another `surefoot up` is starting the stack")
    print(f"the stack is {found.stack.state} already")
    _tell_urls(found.stack)
    if not found.healthy:
        _print_status(found)
        raise typer.Exit(EXIT_FAILED)


def _tell_failure(layout: Layout) -> None:
    stack = read_stack(layout.home)
    for name in (stack.failed if stack is not None else []) or ["supervisor"]:
        print(f"\nend of {layout.log_file(name)}:", file=sys.stderr)
        for line in tail(layout.log_file(name), LOG_LINES):
            print(f"  {line}", file=sys.stderr)
    print(file=sys.stderr)


def _finish(layout: Layout, stack: Stack | None, code: int) -> None:
    """Drain what is left, say what stays, and exit."""
    from surefoot.embedded.leftovers import drain_leftovers

    if stack is not None and stack.detail:
        print(f"surefoot: not everything ended well: {stack.detail}; see {layout.logs}", file=sys.stderr)
        code = EXIT_FAILED
    left = drain_leftovers(layout, lambda job, folder: print(f"waiting until {job} is durable ({folder})", flush=True))
    for leftover in left:
        print(f"surefoot: {leftover.job}: {leftover.folder} stays: {leftover.reason}", file=sys.stderr)
    if left or code:
        raise typer.Exit(code or EXIT_FAILED)
    if stack is not None:
        print("stopped")
    raise typer.Exit(0)


def _print_status(found: StackReport) -> None:
    columns = ["SERVICE", "STATE", "SINCE", "PID", "RESTARTS", "DETAIL"]
    rows = [
        [s.name, s.state, f"{s.seconds:,.0f} s", str(s.pid or "-"), str(s.restarts), s.detail] for s in found.services
    ]
    print_table(columns, rows)
    assert found.stack is not None
    _tell_urls(found.stack)


def _as_data(found: StackReport) -> dict[str, object]:
    stack = found.stack
    return {
        "healthy": found.healthy,
        "state": stack.state if stack else StackState.STOPPED,
        "pid": stack.pid if stack else None,
        "urls": stack.urls if stack else {},
        "token_file": stack.token_file if stack else None,
        "services": [service._asdict() for service in found.services],
    }
