from __future__ import annotations

import socket

import pytest

from surefoot.errors import SurefootError
from surefoot.listening import listen


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_any_free_port(host: str) -> None:
    with listen(host, 0, "SUREFOOT_API") as listener, socket.create_connection(listener.getsockname()[:2], 5):
        pass


def test_a_port_in_use_and_an_address_of_nobody_are_named() -> None:
    with listen("127.0.0.1", 0, "SUREFOOT_API") as first:
        port = first.getsockname()[1]
        with pytest.raises(SurefootError, match=f"SUREFOOT_API_PORT: 127.0.0.1:{port} is in use"):
            listen("127.0.0.1", port, "SUREFOOT_API")
    with pytest.raises(SurefootError, match=r"SUREFOOT_API_HOST: .*192\.0\.2\.1"):  # RFC 5737: documentation only
        listen("192.0.2.1", 0, "SUREFOOT_API")
