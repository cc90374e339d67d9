from __future__ import annotations

import errno
import os

import pytest

from surefoot.checkpoint.store import LocalStore
from surefoot.checkpoint.watched_store import WatchedStore, explain
from surefoot.errors import CheckpointError

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Broken(LocalStore):
    """Everything fails with one and the same error."""

    def write(self, key, chunks, *, if_absent=False):
        raise FULL

    def read(self, key):
        raise FULL

    def list(self, prefix):
        raise FULL

    def move(self, source, target):
        raise FULL

    def delete(self, key):
        raise FULL


def test_it_does_what_the_store_does(tmp_path):
    store = WatchedStore(LocalStore(tmp_path))
    assert str(store) == str(tmp_path)
    store.write("a/b", [b"content"])
    with store.read("a/b") as file:
        assert file.seek(0, os.SEEK_END) == 7
        assert file.seek(0) == 0
        assert file.readall() == b"content"
        file.seek(3)
        piece = bytearray(10)
        assert (file.readinto(piece), piece[:4]) == (4, b"tent")
    assert store.list("a") == ["b"]
    store.move("a/b", "a/c")
    store.delete("a/c")
    assert store.list("a") == []
    assert store.num_written == 1


@pytest.mark.parametrize(
    ("operation", "call"),
    [
        ("write a/b", lambda store: store.write("a/b", [])),
        ("read a/b", lambda store: store.read("a/b")),
        ("list a", lambda store: store.list("a")),
        ("list", lambda store: store.list("")),
        ("move a", lambda store: store.move("a", "b")),
        ("delete a", lambda store: store.delete("a")),
    ],
)
def test_it_knows_what_failed(tmp_path, operation, call):
    store = WatchedStore(Broken(tmp_path))
    with pytest.raises(OSError, match="No space") as caught:
        call(store)
    assert store.operation_of(caught.value) == operation
    assert store.operation_of(OSError(errno.ENOSPC, "another one")) is None
    assert store.num_written == 0


def test_an_error_met_while_cleaning_up_does_not_hide_the_first(tmp_path):
    class Gone(LocalStore):
        def write(self, key, chunks, *, if_absent=False):
            raise OSError(errno.EIO, "first")

        def list(self, prefix):
            raise OSError(errno.EIO, "second")

    store = WatchedStore(Gone(tmp_path))
    with pytest.raises(OSError, match="first") as first:
        store.write("a", [])
    with pytest.raises(OSError, match="second") as second:
        store.list("")
    assert [store.operation_of(caught.value) for caught in (first, second)] == ["write a", "list"]


def test_answers_that_a_store_promises_are_no_failures(tmp_path):
    store = WatchedStore(LocalStore(tmp_path))
    store.write("a", [b"x"], if_absent=True)
    with pytest.raises(FileExistsError) as exists:
        store.write("a", [b"x"], if_absent=True)
    with pytest.raises(FileNotFoundError) as missing:
        store.read("b")
    assert store.operation_of(exists.value) is store.operation_of(missing.value) is None


@pytest.mark.parametrize(
    ("error", "where", "text"),
    [
        (FULL, "/s/job/a", "ENOSPC: No space left on device: /s/job/a"),
        (OSError(errno.EIO, "Input/output error", "/dev/x"), "", "EIO: Input/output error: /dev/x"),
        (OSError(errno.EIO, "Input/output error"), "", "EIO: Input/output error: no path given"),
        (OSError(9999, "odd"), "/a", "errno 9999: odd: /a"),
        (OSError("only text"), "/a", "only text"),
        (CheckpointError("of a newer format"), "/a", "of a newer format"),
    ],
)
def test_errors_are_explained_in_a_line(error, where, text):
    assert explain(error, where) == text
