"""Retention carried out: what nothing keeps goes to trash/ and is deleted there.

For each checkpoint: a note with the reason, one rename to trash/ (readers see all of it or nothing of it; whoever has
a file open reads on), a second look with what is so by now, which puts it back where it is wanted after all, then the
deletion, then the event. Cut off anywhere, the next call finishes it. Several processes may prune one job at once.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from uuid import NAMESPACE_URL, uuid5

from pydantic import BaseModel, ConfigDict, ValidationError

from surefoot.checkpoint.attempts import RESERVE_KEY, AttemptLog
from surefoot.checkpoint.catalog import read_manifest, read_part
from surefoot.checkpoint.ids import CheckpointId, folder_name, parse_folder_name
from surefoot.checkpoint.lineage import candidates
from surefoot.checkpoint.manifest import MANIFEST_FILE
from surefoot.checkpoint.marks import PINNED_FILE, STABLE_FILE, TRASH_FOLDER
from surefoot.checkpoint.retention import CheckpointFacts, Policy, decide
from surefoot.checkpoint.store import Store
from surefoot.errors import CheckpointError
from surefoot.events import CheckpointPruned
from surefoot.faultpoints import reach

Refine = Callable[[CheckpointFacts], CheckpointFacts]
"""Adds what the files do not say of a checkpoint, such as that it was verified."""

_NOTE_SUFFIX = ".json"

_log = logging.getLogger("surefoot.prune")


class _Note(BaseModel):
    """`trash/step-000000120-a0003.json`: what the folder beside it was, and why it goes."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    reason: str = "found in trash"
    num_bytes: int = 0
    loss: float | None = None


@dataclass(frozen=True)
class Content:
    """What a manifest and the scalars say that retention uses; never changes."""

    num_bytes: int
    loss: float | None


@dataclass(frozen=True)
class Present:
    """What lies on storage, at its place or on its way out.

    Attributes:
        facts: Of all of it.
        in_place: What is not in trash/.
        starts_from: What the newest attempt started from.
    """

    facts: tuple[CheckpointFacts, ...]
    in_place: frozenset[CheckpointId]
    starts_from: frozenset[CheckpointId]

    def unwanted(
        self, policy: Policy, protected: Collection[CheckpointId], refine: Refine | None
    ) -> dict[CheckpointId, str]:
        """Return what nothing keeps, with the reasons."""
        facts = self.facts if refine is None else map(refine, self.facts)
        return dict(decide(facts, policy, {*protected, *self.starts_from}))


class FactReader:
    """Reads what retention needs of one job's checkpoints; what never changes is read once. One thread.

    Args:
        store: The job's storage.
        promotes: Somebody promotes here (a stack runs the job), so candidates for STABLE must live long enough.
    """

    def __init__(self, store: Store, *, promotes: bool = True) -> None:
        self._store, self._promotes = store, promotes
        self._attempts = AttemptLog(store)
        self._known: dict[CheckpointId, Content] = {}

    def content(self, checkpoint: CheckpointId) -> Content | None:
        """Return size and loss of a committed checkpoint; None where it is damaged or cannot be read or understood."""
        if checkpoint not in self._known:
            try:
                manifest = read_manifest(self._store, checkpoint)
                scalars = read_part(self._store, manifest, 0).scalars or {}
            except (CheckpointError, OSError):  # one that cannot be read must not keep the others from going
                return None
            loss = scalars.get("loss")
            self._known[checkpoint] = Content(
                manifest.num_bytes, float(loss) if isinstance(loss, int | float) else None
            )
        return self._known[checkpoint]

    def read(self) -> Present:
        """Return what is there now. What is in trash/ counts: it may have to come back.

        Raises:
            AttemptError: a record is missing or damaged, so the lineage is not known.
            OSError: storage fails.
        """
        records = self._attempts.read_all()
        newest = max(records, default=0)
        in_place = self._folders("")
        found = self._folders(TRASH_FOLDER) | in_place
        current = set(candidates(found, newest, records))
        facts = []
        for id_, names in found.items():
            content = self._content_of(id_, id_ in in_place)
            facts.append(
                CheckpointFacts(
                    id_,
                    is_current=id_ in current,
                    is_stable=STABLE_FILE in names,
                    is_pinned=PINNED_FILE in names,
                    is_candidate=self._promotes and STABLE_FILE not in names,
                    is_damaged=content is None,
                    loss=None if content is None else content.loss,
                )
            )
        starts_from = {records[newest].starts_from.checkpoint_id} if records else set()
        return Present(tuple(facts), frozenset(in_place), frozenset(starts_from))

    def _content_of(self, checkpoint: CheckpointId, is_in_place: bool) -> Content | None:
        if is_in_place or checkpoint in self._known:
            return self.content(checkpoint)
        note = _read_note(self._store, checkpoint)
        return Content(note.num_bytes, note.loss)

    def _folders(self, parent: str) -> dict[CheckpointId, list[str]]:
        named = ((name, parse_folder_name(name)) for name in self._store.list(parent))
        listed = {id_: self._store.list(f"{parent}/{name}".lstrip("/")) for name, id_ in named if id_ is not None}
        return {id_: names for id_, names in listed.items() if MANIFEST_FILE in names}


def has_trash(store: Store) -> bool:
    """Tell whether an earlier `prune` left something to finish."""
    return bool(store.list(TRASH_FOLDER))


def plan(
    store: Store,
    policy: Policy,
    *,
    protected: Collection[CheckpointId] = (),
    refine: Refine | None = None,
    reader: FactReader | None = None,
) -> list[tuple[CheckpointId, str]]:
    """Return what `prune` would remove now, oldest first, each with the reason. Changes nothing.

    Args:
        store: The job's storage.
        policy: The rules, `CheckpointSpec.retention`.
        protected: What must stay besides, e.g. what a pending command names.
        refine: Applied to the facts of each checkpoint.
        reader: Kept between calls it saves reading; None: one for this call.

    Raises:
        AttemptError: a record is missing or damaged, so the lineage is not known.
        OSError: storage fails.
    """
    present = (reader or FactReader(store)).read()
    return [
        (id_, reason) for id_, reason in present.unwanted(policy, protected, refine).items() if id_ in present.in_place
    ]


def prune(
    store: Store,
    policy: Policy,
    *,
    job: str,
    emit: Callable[[CheckpointPruned], None] = lambda _: None,
    protected: Collection[CheckpointId] = (),
    only: Collection[CheckpointId] | None = None,
    refine: Refine | None = None,
    reader: FactReader | None = None,
) -> list[tuple[CheckpointId, str]]:
    """Remove what nothing keeps and finish what an earlier call left. Not on the step path: it waits for a disk.

    Works on a full disk too, which it is the cure for.

    Args:
        store: The job's storage.
        policy: The rules, `CheckpointSpec.retention`.
        job: Its name, for the events.
        emit: Takes the events; each comes at least once, with the same `event_id`. When it raises, the next call
            hands over what is left.
        protected: What must stay besides, e.g. what a pending command names.
        only: Nothing else is removed; None: no restriction.
        refine: Applied to the facts of each checkpoint.
        reader: Kept between calls it saves reading; None: one for this call.

    Returns:
        What is gone now, each with the reason.

    Raises:
        AttemptError: a record is missing or damaged; nothing was removed.
        OSError: storage fails; what was not removed is in place or in trash/.
    """
    reader = reader or FactReader(store)

    def finish() -> list[tuple[CheckpointId, str]]:
        if not has_trash(store):
            return []
        # Listed before the second look: what another process moves there after it is for that process to judge.
        moved = list(filter(None, map(parse_folder_name, store.list(TRASH_FOLDER))))
        present = reader.read()
        unwanted = present.unwanted(policy, protected, refine)
        for id_ in moved:
            _empty_or_put_back(store, id_, is_wanted=id_ not in unwanted and id_ not in present.in_place)
        return _tell(store, job, emit)

    gone = finish()
    for id_, reason in plan(store, policy, protected=protected, refine=refine, reader=reader):
        content = reader.content(id_)
        if content is not None and (only is None or id_ in only):
            _move_to_trash(store, id_, _Note(reason=reason, num_bytes=content.num_bytes, loss=content.loss))
    return sorted({*gone, *finish()})


def _move_to_trash(store: Store, checkpoint: CheckpointId, note: _Note) -> None:
    name = folder_name(checkpoint)
    content = [note.model_dump_json().encode()]
    try:
        store.write(_note_key(checkpoint), content)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        # What makes room on a full disk must not need any. The drain keeps a reserve again when there is some.
        store.delete(RESERVE_KEY)
        store.write(_note_key(checkpoint), content)
    reach("prune.noted")
    try:
        store.move(name, f"{TRASH_FOLDER}/{name}")
    except FileNotFoundError:  # another one was faster, or it was quarantined
        if name not in store.list(TRASH_FOLDER):
            store.delete(_note_key(checkpoint))
    reach("prune.moved")


def _empty_or_put_back(store: Store, checkpoint: CheckpointId, *, is_wanted: bool) -> None:
    name = folder_name(checkpoint)
    key = f"{TRASH_FOLDER}/{name}"
    if is_wanted and MANIFEST_FILE in store.list(key):
        _log.info("%s stays after all", name)
        try:
            store.move(key, name)
        except FileNotFoundError:
            return  # another one was faster
        reach("prune.put_back")
        store.delete(_note_key(checkpoint))
    else:
        reach("prune.checked")
        store.delete(key)
        reach("prune.deleted")


def _tell(store: Store, job: str, emit: Callable[[CheckpointPruned], None]) -> list[tuple[CheckpointId, str]]:
    """Hand over the event of each note whose checkpoint is gone; drop the notes."""
    gone = []
    names = store.list(TRASH_FOLDER)
    noted = (parse_folder_name(name.removesuffix(_NOTE_SUFFIX)) for name in names if name.endswith(_NOTE_SUFFIX))
    for id_ in sorted(filter(None, noted)):
        name = folder_name(id_)
        if name in names:
            continue
        if MANIFEST_FILE not in store.list(name):
            note = _read_note(store, id_)
            emit(_event(job, id_, note))
            reach("prune.told")
            _log.info("%s removed: %s", name, note.reason)
            gone.append((id_, note.reason))
        store.delete(_note_key(id_))
    return gone


def _event(job: str, checkpoint: CheckpointId, note: _Note) -> CheckpointPruned:
    # The same id for one that is told twice.
    told = uuid5(NAMESPACE_URL, f"surefoot:pruned:{job}:{folder_name(checkpoint)}").hex
    attempt, step = checkpoint
    return CheckpointPruned(
        event_id=told, job=job, attempt=attempt, step=step, num_bytes=note.num_bytes, reason=note.reason
    )


def _read_note(store: Store, checkpoint: CheckpointId) -> _Note:
    try:
        with store.read(_note_key(checkpoint)) as file:
            return _Note.model_validate_json(file.readall())
    except (FileNotFoundError, ValidationError):
        return _Note()


def _note_key(checkpoint: CheckpointId) -> str:
    return f"{TRASH_FOLDER}/{folder_name(checkpoint)}{_NOTE_SUFFIX}"
