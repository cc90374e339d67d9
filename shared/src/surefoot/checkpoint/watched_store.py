"""A store that remembers which operations failed last, so that whoever meets an error can name its."""

from __future__ import annotations

import errno
import io
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

from surefoot.checkpoint.store import Store, Written

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer as Buffer


class WatchedStore:
    """Another store with a memory for failures. One thread, since it remembers only the last ones.

    What a store answers with an exception as part of its promise (`FileExistsError` with `if_absent`,
    `FileNotFoundError`) is no failure.

    Args:
        store: Does the work.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        # Two: whoever cleans up after an error may meet another before the first is reported.
        self._failed: deque[tuple[BaseException, str]] = deque(maxlen=2)
        self.num_written = 0
        """Files written so far: while it grows, storage takes writes."""

    def __str__(self) -> str:
        return str(self._store)

    def write(self, key: str, chunks: Iterable[bytes | memoryview], *, if_absent: bool = False) -> Written:
        """Write; see `Store`."""
        with self._watch("write", key):
            written = self._store.write(key, chunks, if_absent=if_absent)
        self.num_written += 1
        return written

    def read(self, key: str) -> io.RawIOBase:
        """Open for reading; see `Store`. Errors of the open file are remembered too."""
        with self._watch("read", key):
            return _WatchedFile(self._store.read(key), lambda: self._watch("read", key))

    def list(self, prefix: str) -> list[str]:
        """List the children; see `Store`."""
        with self._watch("list", prefix):
            return self._store.list(prefix)

    def move(self, source: str, target: str) -> None:
        """Rename; see `Store`."""
        with self._watch("move", source):
            self._store.move(source, target)

    def delete(self, key: str) -> None:
        """Remove; see `Store`."""
        with self._watch("delete", key):
            self._store.delete(key)

    def operation_of(self, error: BaseException) -> str | None:
        """Return what failed with this very error, e.g. `write attempts/000001.json`; None: nothing of this store."""
        return next((operation for failed, operation in self._failed if failed is error), None)

    @contextmanager
    def _watch(self, verb: str, key: str) -> Iterator[None]:
        try:
            yield
        except (FileExistsError, FileNotFoundError):
            raise
        except OSError as error:
            self._failed.append((error, f"{verb} {key}".rstrip()))
            raise


class _WatchedFile(io.RawIOBase):
    """An open file of a watched store."""

    def __init__(self, file: io.RawIOBase, watch: Callable[[], AbstractContextManager[None]]) -> None:
        self._file = file
        self._watch = watch

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Buffer, /) -> int | None:
        with self._watch():
            return self._file.readinto(buffer)

    def readall(self) -> bytes:
        with self._watch():
            return self._file.readall()

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        with self._watch():
            return self._file.seek(offset, whence)

    def close(self) -> None:
        self._file.close()
        super().close()


def explain(error: BaseException, where: str) -> str:
    """Return the name of the errno, what the system says, and the path: one line for people.

    Args:
        error: What was caught.
        where: Path of what was worked on, for an error that does not name one.
    """
    if not isinstance(error, OSError) or error.errno is None:
        return str(error)
    name = errno.errorcode.get(error.errno, f"errno {error.errno}")
    return f"{name}: {error.strerror}: {where or error.filename or 'no path given'}"
