"""Settings of the api, beside the common ones."""

from __future__ import annotations

import re
from functools import cached_property
from ipaddress import ip_address

from pydantic import Field, SecretStr

from surefoot.errors import UsageError
from surefoot.settings import CommonSettings


class ApiSettings(CommonSettings):
    """What the api needs to know. Prefix SUREFOOT_, so the fields carry the rest of SUREFOOT_API_*."""

    api_host: str = "127.0.0.1"
    """Address to listen on: 127.0.0.1, ::1 or localhost without a token, any address with one."""
    api_port: int = Field(default=8470, ge=0, lt=65536)
    """Port to listen on; 0: a free one, which the log names."""
    api_token: SecretStr = SecretStr("")
    """Clients must send `Authorization: Bearer <token>`. Empty: none is asked for, and only this machine may call."""
    api_preflight: bool = True
    """Check at submit that this machine can start the job; off where the workers are other machines."""
    api_max_streams: int = Field(default=64, ge=1, le=1000)
    """Clients that may follow events or logs at the same time; each takes a thread."""

    @cached_property
    def token(self) -> str | None:
        """The token, None when there is none."""
        return self.api_token.get_secret_value() or None

    def check(self) -> None:
        """Refuse to be open to the network without a token.

        Raises:
            UsageError: the address is not this machine's own and there is no token, or the token cannot be sent.
        """
        if self.token is None and not is_loopback(self.api_host):
            raise UsageError(
                "SUREFOOT_API_HOST",
                f"is {self.api_host}: other machines may only call with a token; set SUREFOOT_API_TOKEN, "
                "or listen on 127.0.0.1",
            )
        # RFC 6750, 2.1: what may stand behind `Bearer`.
        if self.token is not None and not re.fullmatch(r"[A-Za-z0-9._~+/-]+=*", self.token):
            raise UsageError("SUREFOOT_API_TOKEN", "allowed: letters, digits and -._~+/, then = signs")


def is_loopback(host: str) -> bool:
    """Return whether a host name or address can only mean this machine."""
    if host.lower() == "localhost":
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
