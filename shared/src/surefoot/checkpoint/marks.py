"""Marks: small files beside a manifest that say more about a committed checkpoint. A manifest never lists them.

`stable.json` is its promotion, `pinned.json` keeps retention from removing it. Retention moves what nothing keeps to
`trash/` and looks at the marks again before it deletes anything there, so of a mark and a removal at the same moment
the mark wins (see `prune`).
"""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime
from typing import Literal, TypeVar

from pydantic import AwareDatetime, BaseModel, ConfigDict, ValidationError

from surefoot.checkpoint.ids import CheckpointId, folder_name
from surefoot.checkpoint.manifest import MANIFEST_FILE
from surefoot.checkpoint.store import Store
from surefoot.errors import CheckpointError, UsageError
from surefoot.faultpoints import reach

STABLE_FILE = "stable.json"
PINNED_FILE = "pinned.json"
TRASH_FOLDER = "trash"
"""Checkpoints on their way out of storage; nobody but retention looks there."""


class _Mark(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


_M = TypeVar("_M", bound=_Mark)


class StableMark(_Mark):
    """Content of `stable.json`: why the checkpoint was promoted."""

    version: Literal[1] = 1
    job: str
    attempt: int
    step: int
    cleared_attempt: int
    cleared_through_step: int
    probation_steps: int
    promoted_at: AwareDatetime


class PinMark(_Mark):
    """Content of `pinned.json`: who keeps the checkpoint, and what for."""

    version: Literal[1] = 1
    reason: str
    pinned_by: str
    pinned_at: AwareDatetime


def pin(store: Store, checkpoint: CheckpointId, reason: str, by: str, now: datetime | None = None) -> PinMark:
    """Keep a committed checkpoint until it is unpinned, durable on return. Pinned again: the newest reason counts.

    Args:
        store: The job's storage.
        checkpoint: Which one; abandoned ones too.
        reason: What for, for people.
        by: Who wants it.
        now: Present time with a zone; None: the clock's.

    Raises:
        UsageError: `reason` or `by` says nothing.
        CheckpointError: there is no such committed checkpoint, or it was removed at this moment.
        OSError: storage fails.
    """
    for key, text in (("reason", reason), ("by", by)):
        if not text.strip():
            raise UsageError(key, "must not be empty: say why, or who, so that somebody can unpin it one day")
    mark = PinMark(reason=reason, pinned_by=by, pinned_at=now or datetime.now(UTC))
    _put(store, checkpoint, PINNED_FILE, mark)
    return mark


def unpin(store: Store, checkpoint: CheckpointId) -> bool:
    """Leave a checkpoint to retention again; return whether it was pinned.

    Raises:
        CheckpointError: there is no such committed checkpoint.
        OSError: storage fails.
    """
    folder = folder_name(checkpoint)
    names = store.list(folder)
    if MANIFEST_FILE not in names:
        raise _absent(store, folder)
    store.delete(f"{folder}/{PINNED_FILE}")
    return PINNED_FILE in names


def read_pin(store: Store, checkpoint: CheckpointId) -> PinMark | None:
    """Return who pinned a checkpoint and why, None when nobody did.

    Raises:
        CheckpointError: the file cannot be understood; the checkpoint is kept all the same.
        OSError: storage fails.
    """
    return _read(store, checkpoint, PINNED_FILE, PinMark)


def promote(store: Store, checkpoint: CheckpointId, mark: StableMark) -> None:
    """Make a committed checkpoint STABLE, durable on return. Where it is one already the first mark stays.

    Raises:
        CheckpointError: there is no such committed checkpoint, or it was removed at this moment.
        OSError: storage fails.
    """
    with suppress(FileExistsError):
        _put(store, checkpoint, STABLE_FILE, mark, if_absent=True)


def read_stable(store: Store, checkpoint: CheckpointId) -> StableMark | None:
    """Return why a checkpoint was promoted, None when it was not.

    Raises:
        CheckpointError: the file cannot be understood.
        OSError: storage fails.
    """
    return _read(store, checkpoint, STABLE_FILE, StableMark)


def _put(store: Store, checkpoint: CheckpointId, file: str, mark: _Mark, *, if_absent: bool = False) -> None:
    folder = folder_name(checkpoint)
    if MANIFEST_FILE not in store.list(folder):
        raise _absent(store, folder)
    reach("marks.checked")
    try:
        store.write(f"{folder}/{file}", [mark.model_dump_json().encode() + b"\n"], if_absent=if_absent)
    except FileNotFoundError:
        raise _absent(store, folder) from None
    # Retention may have moved the folder meanwhile. With the mark in it, it will come back; else the write made a
    # folder of that name with nothing but the mark in it.
    names = store.list(folder)
    if MANIFEST_FILE in names or file in store.list(f"{TRASH_FOLDER}/{folder}"):
        return
    if names == [file]:
        store.delete(folder)
    raise _absent(store, folder)


def _read(store: Store, checkpoint: CheckpointId, file: str, kind: type[_M]) -> _M | None:
    key = f"{folder_name(checkpoint)}/{file}"
    try:
        with store.read(key) as opened:
            data = opened.readall()
    except FileNotFoundError:
        return None
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        raise CheckpointError(f"{store}/{key}: cannot be understood: {field or 'content'}: {first['msg']}") from None


def _absent(store: Store, folder: str) -> CheckpointError:
    return CheckpointError(f"{store}/{folder}: no committed checkpoint is there")
