"""The `surefoot` command: its commands, its plug-ins, and the one place where errors become exit codes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from surefoot import __version__
from surefoot.cli import checkpoints, client_jobs, client_watch, jobs, stack
from surefoot.errors import EXIT_FAILED, SurefootError, UsageError

PLUGIN_GROUP = "surefoot.commands"
"""Entry points of this group are commands: a function that typer can take."""
PLUGIN_PACKAGES = {"run": "surefoot-worker"}
"""Where known plug-ins come from, to say so when one is missing."""

EXIT_CODES = (
    "Exit status: 0 done; 1 failed, or not there; 2 bad input, nothing was started or written; "
    "3 damage found; 75 stopped on request with everything saved (run it again to go on)."
)


class PluginGroup(TyperGroup):
    """Adds the commands that other packages declare; each is imported when it is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return built-in and plug-in names."""
        return [*sorted({*PLUGIN_PACKAGES, *_plugins()}), *super().list_commands(ctx)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command, or None for a name that nobody declares."""
        plugins = _plugins()
        if cmd_name in plugins:
            return _as_command(cmd_name, _load(plugins[cmd_name]))
        if cmd_name in PLUGIN_PACKAGES:
            package = PLUGIN_PACKAGES[cmd_name]
            return _as_command(cmd_name, _refusing(cmd_name, f"needs the package {package}: pip install {package}"))
        return super().get_command(ctx, cmd_name)


app = typer.Typer(
    name="surefoot",
    cls=PluginGroup,
    help="Surefoot keeps LLM training running: atomic checkpoints, exact resume, sub-second recovery.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
checkpoints.register(app)
jobs.register(app)
stack.register(app, EXIT_CODES)
client_jobs.register(app, EXIT_CODES)
client_watch.register(app, EXIT_CODES)


def main() -> NoReturn:
    """Run the command line. Errors that are meant for a person become one line on stderr and an exit code."""
    try:
        app(prog_name="surefoot")
    except SurefootError as error:
        _exit(str(error), error.exit_code)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _exit(f"{where}{error.strerror or error}", EXIT_FAILED)
    sys.exit(0)


def _exit(message: str, code: int) -> NoReturn:
    print(f"surefoot: error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)


def _version(requested: bool) -> None:
    if requested:
        print(f"surefoot {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_version, help="Print the version and exit.")
    ] = False,
) -> None:
    del version  # its callback did it


def _plugins() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=PLUGIN_GROUP)}


def _load(point: EntryPoint) -> Callable[..., None]:
    try:
        function: Callable[..., None] = point.load()
    except (ImportError, AttributeError) as error:
        return _refusing(point.name, f"its package cannot be imported: {error}")
    return function


def _refusing(name: str, problem: str) -> Callable[..., None]:
    def refuse(words: Annotated[list[str] | None, typer.Argument(hidden=True)] = None) -> None:
        del words
        raise UsageError(name, problem)

    refuse.__doc__ = f"Not available: {problem}"
    return refuse


def _as_command(name: str, function: Callable[..., None]) -> Any:
    single = typer.Typer(add_completion=False, rich_markup_mode="rich")
    lenient = {"ignore_unknown_options": True} if function.__name__ == "refuse" else {}
    single.command(name, epilog=EXIT_CODES, context_settings=lenient)(function)
    return typer.main.get_command(single)


if __name__ == "__main__":
    main()
