"""Ports on the loopback address."""

from __future__ import annotations

import socket

from surefoot.errors import SurefootError

LOOPBACK = "127.0.0.1"


class PortInUse(SurefootError):
    """Somebody else listens on a port that was asked for."""


def choose_port(option: str, wanted: int | None, last: int | None = None) -> int:
    """Return a port that is free now.

    Args:
        option: What the user would set it with, for the error.
        wanted: The port that was asked for; None or 0: any.
        last: The port that the stack had last time, taken again when it is free.

    Raises:
        PortInUse: the wanted one is in use.
    """
    if wanted:
        if not _is_free(wanted):
            raise PortInUse(f"{option}: port {wanted} of {LOOPBACK} is in use; name another, or none")
        return wanted
    return last if last and _is_free(last) else _any_free()


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # As servers do it: connections of the last one, which linger for a minute, are no reason.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
        return True


def _any_free() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])
