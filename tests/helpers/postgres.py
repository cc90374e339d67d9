"""A PostgreSQL server of the tests' own: on a socket in a temporary folder, gone with the tests."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote


def postgres_binaries() -> Path | None:
    """Return the folder with initdb and postgres: those of PATH, else the newest that Debian installed."""
    on_path = shutil.which("initdb")
    installed = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name))
    folders = [Path(on_path).resolve().parent] if on_path else installed
    return folders[-1] if folders and (folders[-1] / "postgres").exists() else None


class PostgresServer:
    """A server that can be stopped and started again."""

    def __init__(self, binaries: Path, folder: Path) -> None:
        self._binaries, self._folder = binaries, folder
        self._account = _account()
        os.chown(folder, self._account.pw_uid, self._account.pw_gid)
        self._call("initdb", "-D", str(folder / "data"), "-U", "surefoot", "--auth=trust", "--no-sync")

    def url(self, name: str) -> str:
        return f"postgresql+psycopg://surefoot@/{name}?host={quote(str(self._folder))}"

    def create(self, name: str, template: str = "template0") -> str:
        """Make a database, as a copy of another one; return its URL."""
        self._call("createdb", "-h", str(self._folder), "-U", "surefoot", "-T", template, name)
        return self.url(name)

    def start(self) -> None:
        """Start and wait until it answers."""
        options = "-c listen_addresses='' -c fsync=off -c max_connections=30 -k " + str(self._folder)
        log = str(self._folder / "log")
        self._call("pg_ctl", "-D", str(self._folder / "data"), "-w", "-l", log, "-o", options, "start")

    def stop(self) -> None:
        """Stop at once, as in a crash; connections break."""
        self._call("pg_ctl", "-D", str(self._folder / "data"), "-w", "-m", "immediate", "stop")

    def _call(self, program: str, *arguments: str) -> None:
        command = [str(self._binaries / program), *arguments]
        # It refuses to run as root.
        done = subprocess.run(
            command,
            user=self._account.pw_uid,
            group=self._account.pw_gid,
            cwd=self._folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if program != "pg_ctl" else subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
            check=False,
        )
        assert done.returncode == 0, f"{program}: {(done.stdout or b'').decode()}"


@contextmanager
def postgres_server(binaries: Path) -> Iterator[PostgresServer]:
    # Not below pytest's folder: others may not enter it, and a socket's path is short.
    folder = Path(tempfile.mkdtemp(prefix="surefoot-pg-", dir="/tmp"))
    server = PostgresServer(binaries, folder)
    server.start()
    try:
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder)


def _account() -> pwd.struct_passwd:
    if os.geteuid() != 0:
        return pwd.getpwuid(os.geteuid())
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    raise LookupError("no account to run PostgreSQL with")
