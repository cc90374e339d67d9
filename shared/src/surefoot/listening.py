"""The listening socket of a service that is called over HTTP."""

from __future__ import annotations

import errno
import socket

from surefoot.errors import SurefootError


def listen(host: str, port: int, prefix: str) -> socket.socket:
    """Return a socket that listens, so that a port in use is known before anything is started.

    Args:
        host: Name or address; IPv6 with or without brackets.
        port: 0: any free one.
        prefix: Of the settings that hold them, for the error: SUREFOOT_API of SUREFOOT_API_HOST and _PORT.

    Raises:
        SurefootError: the address or the port cannot be had; names the setting.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise SurefootError(f"{prefix}_HOST: {host}: {error.strerror or error}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            problem = "is in use by another process; name another port"
            raise SurefootError(f"{prefix}_PORT: {host}:{port} {problem}") from None
        raise SurefootError(f"{prefix}_HOST: cannot listen on {host}:{port}: {error.strerror or error}") from None
    return listener
