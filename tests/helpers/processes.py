"""Python processes of a test's own, ended when the test ends."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


@contextmanager
def started_script(code: str, *arguments: str, env: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run code in a new interpreter; SIGTERM at the end, SIGKILL when that does nothing."""
    process = subprocess.Popen([sys.executable, "-c", code, *arguments], env=dict(env))
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
