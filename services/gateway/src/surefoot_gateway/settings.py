"""Settings of the gateway, beside the common ones."""

from __future__ import annotations

from pydantic import Field

from surefoot.settings import CommonSettings


class GatewaySettings(CommonSettings):
    """What the gateway needs to know. Prefix SUREFOOT_, so the fields carry the rest of SUREFOOT_GATEWAY_*."""

    gateway_host: str = "127.0.0.1"
    """Address that it listens on. Nothing asks for a password here: any other than loopback is for closed networks."""
    gateway_port: int = Field(default=9464, ge=0, le=65535)
    """Port that it listens on; 0: any free one, named in the log."""
    gateway_max_jobs: int = Field(default=100, ge=1)
    """Jobs that are kept; the one that was silent for longest goes first, with its series."""
