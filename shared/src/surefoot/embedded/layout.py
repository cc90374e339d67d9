"""Where the stack keeps things: one folder, `.surefoot` unless told otherwise."""

from __future__ import annotations

from pathlib import Path


class Layout:
    """Paths below the home folder of a stack.

    Args:
        home: The folder; made absolute.
    """

    def __init__(self, home: Path) -> None:
        self.home = home.absolute()
        self.run = self.home / "run"
        self.logs = self.home / "logs"
        self.db = self.home / "db"
        self.checkpoints = self.home / "checkpoints"
        self.health = self.run / "health"
        self.stack_file = self.run / "stack.json"
        self.plan_file = self.run / "plan.json"
        self.lock_file = self.run / "supervisor.lock"
        self.server_secrets = self.run / "server.conf"
        self.token_file = self.run / "token"
        self.database_file = self.db / "surefoot.sqlite3"

    def make(self) -> None:
        """Make the folders; `run` and `db` are nobody else's to read.

        Raises:
            OSError: one cannot be made.
        """
        for folder in (self.logs, self.checkpoints):
            folder.mkdir(parents=True, exist_ok=True)
        for folder in (self.run, self.db):
            folder.mkdir(mode=0o700, exist_ok=True)
        self.health.mkdir(exist_ok=True)

    def log_file(self, service: str) -> Path:
        """Return the log of a service."""
        return self.logs / f"{service}.log"
