"""Settings that all services share.

Each service adds its own by a subclass in its `settings.py`, as fields `<service>_<name>`: the prefix SUREFOOT_ makes
SUREFOOT_<SERVICE>_<NAME> of them, and those here keep their one name for all.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from surefoot.errors import UsageError

SettingsType = TypeVar("SettingsType", bound=BaseSettings)


class CommonSettings(BaseSettings):
    """What every service needs to know. `surefoot up` sets these for its services."""

    model_config = SettingsConfigDict(env_prefix="SUREFOOT_", extra="ignore", use_attribute_docstrings=True)

    redis_url: str = "redis://127.0.0.1:6379/0"
    """The Redis-compatible server of the bus."""
    database_url: str = "sqlite:///.surefoot/db/surefoot.sqlite3"
    """The catalogue: an SQLAlchemy URL, sqlite or postgresql+psycopg."""
    home: Path = Path(".surefoot")
    """Folder of everything that services keep on this machine: run, logs, db, checkpoints."""
    log_level: str = Field(default="info", pattern="^(debug|info|warning|error)$")
    """Least level that is logged."""

    @property
    def health_dir(self) -> Path:
        """Folder of the health files."""
        return self.home / "run" / "health"


def load_settings(cls: type[SettingsType]) -> SettingsType:
    """Read settings from the environment.

    Raises:
        UsageError: a value is wrong; names the variable and what is allowed.
    """
    try:
        return cls()
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = str(first["loc"][0]) if first["loc"] else cls.__name__
        variable = f"{cls.model_config.get('env_prefix', '')}{name}".upper()
        raise UsageError(variable, f"{first['msg']} (got {first['input']!r})") from None
