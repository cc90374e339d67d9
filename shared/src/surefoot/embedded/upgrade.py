"""Bring a database to this version without the rest of the command line: `python -m surefoot.embedded.upgrade URL`."""

from __future__ import annotations

import sys

from surefoot.catalogue import migrate
from surefoot.errors import SurefootError

if __name__ == "__main__":
    try:
        upgraded = migrate.upgrade(sys.argv[1])
    except SurefootError as error:
        print(f"surefoot: error: {error}", file=sys.stderr)  # noqa: T201  stderr is the log
        sys.exit(error.exit_code)
    print("the database is upgraded" if upgraded else "the database is up to date")  # noqa: T201
