"""Small files of a service's own state: replaced whole, so that a reader sees the old content or the new.

A killed process leaves either; a power cut may lose the newest. What must survive that is written by
`surefoot.checkpoint.store`, which syncs.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Replace a file's content. Any thread, any process; the last one wins.

    Raises:
        OSError: it cannot be written; the old content stays.
    """
    # Hidden, and named by its writer: nobody's `*.json` finds it, and no two writers share one.
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_native_id()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
