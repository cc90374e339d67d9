"""Run a service that is installed: `python -m surefoot.embedded.serve NAME`, which is what `surefoot serve` does.

Services say where they are by entry points of the group `surefoot.services`: functions without arguments that return
an exit code.
"""

from __future__ import annotations

import sys
from importlib.metadata import entry_points

from pydantic import ValidationError

from surefoot.errors import SurefootError, UsageError

SERVICE_GROUP = "surefoot.services"


def service_names() -> list[str]:
    """Return the services that are installed."""
    return sorted(point.name for point in entry_points(group=SERVICE_GROUP))


def serve(name: str) -> int:
    """Run a service in this process until SIGTERM. Main thread only.

    Raises:
        UsageError: nobody declares it, its package cannot be imported, or a setting is wrong.
        SurefootError: it cannot be built from its settings.
    """
    points = entry_points(group=SERVICE_GROUP, name=name)
    if not points:
        raise UsageError("NAME", f"there is no service {name!r}; installed: {', '.join(service_names()) or 'none'}")
    try:
        main = next(iter(points)).load()
    except (ImportError, AttributeError) as error:
        raise UsageError("NAME", f"the package of the service {name!r} cannot be imported: {error}") from error
    try:
        return int(main())
    except ValidationError as error:
        if not error.title.endswith("Settings"):
            raise
        raise _bad_setting(error) from error


def _bad_setting(error: ValidationError) -> UsageError:
    first = error.errors(include_url=False)[0]
    key = "_".join(str(part) for part in first["loc"]).upper()
    return UsageError(f"SUREFOOT_{key.removeprefix('SUREFOOT_')}", f"{first['msg']}, not {first['input']!r}")


if __name__ == "__main__":
    try:
        sys.exit(serve(*sys.argv[1:2]))
    except SurefootError as error:
        print(f"surefoot: error: {error}", file=sys.stderr)  # noqa: T201  stderr is the log
        sys.exit(error.exit_code)
