"""A toy job through starts, kills and harm. Each start is checked: what it found, what it told, what it made of it.

What must be found is what `toy_oracle` says, and every bit of it what `toy_state` says.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from helpers.forked import Child, Forge
from helpers.toy_drain import PATIENCE_SECONDS, ToyDrain
from helpers.toy_oracle import Oracle, Outlook
from helpers.toy_plan import Damage, Drop, Operation, Prune, Start, Touch
from helpers.toy_state import expected_digests
from helpers.waiting import wait_until
from surefoot.checkpoint.attempts import Source
from surefoot.checkpoint.ids import CheckpointId
from surefoot.events import CommandApplied, CommandRefused, RestoreFellBack
from surefoot.spec import FROM_SEED_ENVIRONMENT_KEY

SEED = Outlook(CheckpointId(0, 0), Source.SEED)

Ranks = Mapping[Path, Child]
"""The file that each rank writes to, and its process; rank 0 first."""


class History:
    """The job in a folder of its own. `close` it at the end.

    Args:
        root: The folder.
        forge: Where its processes are forked, with `helpers.toy_job`.
    """

    def __init__(self, root: Path, forge: Forge) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self.root = root
        self.oracle = Oracle(root)
        self._forge = forge
        self._log = root / "log"
        self._story: list[str] = []
        self._drain = ToyDrain(self.oracle, forge, self._log, self._told)
        self._ranks: Ranks = {}
        self._num_starts = 0
        self._order: dict[str, int] | None = None

    def close(self) -> None:
        """End what is left of it."""
        for child in self._ranks.values():
            child.kill()
        self._drain.kill()
        shutil.rmtree(self.oracle.staging, ignore_errors=True)

    def do(self, *operations: Operation) -> None:
        """Carry out operations, with all checks that belong to them."""
        for operation in operations:
            self._story.append(repr(operation))
            match operation:
                case Start():
                    self._start(operation)
                case Damage():
                    self._damage(operation)
                case Drop():
                    self._drop(operation)
                case Touch():
                    self._touch(operation)
                case Prune():
                    self._prune(operation)

    def begin(self, start: Start) -> Ranks:
        """Start the ranks and let them train, without any check; the caller sees to their end."""
        self._num_starts += 1
        ranks = self._fork(start, self.oracle.outlook(), from_seed=start.from_seed)
        for out in ranks:
            Path(f"{out}.go").touch()
        return ranks

    @contextmanager
    def stopped_drain(self) -> Iterator[int]:
        """Have a drain that is stopped; yield its pid. It goes on, and ends, with the block."""
        self._drain.ensure("", None)
        pid = self._drain.pid()
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        try:
            yield pid
        finally:
            os.kill(pid, signal.SIGCONT)
            self._drain.kill()

    def check_end(self) -> None:
        """Check what no single start shows: only what is damaged went to quarantine."""
        good = [i for i in self.oracle.quarantined() if i is None or i not in self.oracle.ever_unusable]
        assert not good, self._told(f"{good} are in quarantine")

    # Starts.

    def _start(self, start: Start) -> None:
        if any(map(self.oracle.is_unusable, self.oracle.committed())):
            # Retention knows of no flipped bit: its drain and the ranks would race for the good ones.
            start = replace(start, keep_last=None)
        self._num_starts += 1
        outlook = SEED if start.from_seed else self.oracle.outlook()
        self._story.append(f"  must find {outlook}")
        num_told, num_answers = len(self._fall_backs()), len(self._answers())
        ranks = self._fork(start, outlook, from_seed=start.from_seed)
        if outlook.id is None:
            self._check_refused(ranks)
            # A person looks at it and says so.
            outlook, num_told = SEED, len(self._fall_backs())
            ranks = self._fork(start, outlook, from_seed=True)
        self._check_found(ranks, outlook)
        self._check_fall_backs(outlook, num_told)
        for out in ranks:
            Path(f"{out}.go").touch()
        self._await_end(start, ranks)
        for out in ranks:
            for line in _lines(out):
                self._check_state(line)
        self._check_kept(ranks)
        if start.is_undisturbed and self._order is not None and self._order["at_step"] < self._order["total_steps"]:
            self._check_answer(self._answers()[num_answers:])
        self._end_drain(start.ending)

    def _fork(self, start: Start, outlook: Outlook, *, from_seed: bool) -> Ranks:
        folder = self.root / f"start-{self._num_starts}-{'seed' if from_seed else 'newest'}"
        folder.mkdir()
        self._drain.ensure(start.drain_fault, start.keep_last)
        begin = outlook.id.step if outlook.id is not None else 0
        self._order = self._roll_back(start, begin)
        ranks = {}
        for rank in range(start.world_size):
            out = folder / f"rank-{rank}"
            arguments = {
                "root": str(self.root),
                "out": str(out),
                "rank": rank,
                "world_size": start.world_size,
                "total_steps": begin + start.num_steps,
                "faults": start.rank_fault if rank == start.faulty_rank % start.world_size else "",
                "checkpoint": start.checkpoint_spec(),
                "roll_back": self._order,
            }
            env = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(start.world_size)}
            env |= {"GLOO_SOCKET_IFNAME": "lo", FROM_SEED_ENVIRONMENT_KEY: "1" if from_seed else "0"}
            ranks[out] = self._forge.fork("train", arguments, log=self._log, env=env)
        self._ranks = ranks
        return ranks

    def _roll_back(self, start: Start, begin: int) -> dict[str, int] | None:
        current = self.oracle.on_lineage(self.oracle.committed())
        targets = [] if start.from_seed else [i for i in current if i.step <= begin]
        if start.roll_back is None or not targets:
            return None
        target = targets[start.roll_back[1] % len(targets)]
        return {
            "at_step": begin + 1 + start.roll_back[0],
            "total_steps": begin + start.num_steps,
            "to_attempt": target.attempt,
            "to_step": target.step,
            "is_good": not self.oracle.is_unusable(target),
            "number": self._num_starts,  # rises: one that began an attempt is never used again
        }

    def _await_end(self, start: Start, ranks: Ranks) -> None:
        first = next(iter(ranks))

        def have_ended() -> bool:
            codes = [child.poll() for child in ranks.values()]
            if any(codes) or (start.kill_after is not None and len(_lines(first)) > start.kill_after):
                for child in ranks.values():  # as a launcher does
                    child.kill()
                return True
            return None not in codes

        try:
            wait_until(have_ended, PATIENCE_SECONDS, "the ranks end", every_seconds=0.001)
        except AssertionError as error:
            raise AssertionError(self._told(f"{error}; {self._hung(ranks)}")) from None
        codes = {child.wait(1) for child in ranks.values()}
        self._story.append(f"  exit codes {codes}, newest step {_lines(first)[-1].get('step')}")
        # A rank whose neighbour is killed may see that before its own end comes.
        assert codes <= {0, -signal.SIGKILL} or -signal.SIGKILL in codes, self._told(f"exit codes {codes}")
        assert start.is_killed or codes == {0}, self._told(f"exit codes {codes}")

    def _hung(self, ranks: Ranks) -> str:
        """Return what hung ranks were doing, and end them."""
        for child in ranks.values():
            child.dump_stacks()
            wait_until(lambda: "Current thread" in self._log.read_text(), 5, "the stacks are written")
        said = [line for out in ranks for line in _lines(out)[-1:]]
        for child in ranks.values():
            child.kill()
        return f"their last words: {said}"

    def _end_drain(self, ending: str) -> None:
        before = self.oracle.outlook()
        if self._drain.end(ending):
            assert not self.oracle.staging.exists(), self._told("the staging folder is left")
            after = self.oracle.outlook()
            if not self.oracle.ever_unusable:
                assert after.id == before.id, self._told(f"closed down {after.id} is the newest, it was {before.id}")

    # What starts must have found and done.

    def _check_refused(self, ranks: Ranks) -> None:
        for line in self._first_words(ranks):
            assert line.get("error") == "NoUsableCheckpoint", self._told(f"{line} is no refusal")
        assert {child.wait(PATIENCE_SECONDS) for child in ranks.values()} == {0}

    def _first_words(self, ranks: Ranks) -> list[dict[str, Any]]:
        def have_spoken() -> bool:
            return all(_lines(out) or child.poll() is not None for out, child in ranks.items())

        wait_until(have_spoken, PATIENCE_SECONDS, self._told("the ranks say what they found"), every_seconds=0.001)
        for out, child in ranks.items():
            assert _lines(out), self._told(f"{out} ended with {child.poll()}")
        return [_lines(out)[0] for out in ranks]

    def _check_found(self, ranks: Ranks, outlook: Outlook) -> None:
        for line in self._first_words(ranks):
            self._check_state(line)
        found = self.oracle.records()[_lines(next(iter(ranks)))[0]["attempt"]].starts_from
        self._story.append(f"  found {found}")
        assert (found.checkpoint_id, found.source) == (outlook.id, outlook.source), self._told("another state")

    def _check_fall_backs(self, outlook: Outlook, num_told: int) -> None:
        must = [i for i in outlook.fall_backs if i not in outlook.told_before]
        told = self._told(f"the fall-backs {must} are reported")
        wait_until(lambda: set(must) <= set(self._fall_backs()[num_told:]), PATIENCE_SECONDS, told)
        reported = self._fall_backs()[num_told:]
        assert [i for i in reported if i in must] == must, told
        assert set(reported) <= set(outlook.fall_backs), told

    def _check_state(self, line: Mapping[str, Any]) -> None:
        """Check a state that a rank has: all its bits follow from the records."""
        assert "error" not in line, self._told(f"{line}")
        trail = self.oracle.trail(line["attempt"], line["step"])
        assert tuple(map(tuple, line["trail"])) == trail, self._told(f"trail {line['trail']} instead of {trail}")
        if "digests" in line:
            assert line["digests"] == expected_digests(trail), self._told(f"other bits after {trail}")
            assert line["num_updates"] == line["num_forwards"] == len(trail), self._told(f"{line}")

    def _check_kept(self, ranks: Ranks) -> None:
        """Check that what was staged once, and led to the present, is still there, or a newer one."""
        said = {CheckpointId(*line["staged"]) for out in ranks for line in _lines(out) if "staged" in line}
        newest = max(self.oracle.on_lineage(list(said)), default=CheckpointId(0, 0))
        outlook = self.oracle.outlook()
        assert (outlook.id or CheckpointId(0, 0)) >= newest, self._told(f"{newest} was staged; left is {outlook}")

    def _check_answer(self, answers: Sequence[CommandApplied | CommandRefused]) -> None:
        """Check that a roll-back to a good checkpoint was done and one to a damaged one was not."""
        assert self._order is not None
        kind = CommandApplied if self._order["is_good"] else CommandRefused
        # A command of an earlier start, still in staging memory, may be refused now.
        ours = [answer for answer in answers if answer.number == self._order["number"]]
        assert [type(answer) for answer in ours] == [kind], self._told(f"{self._order} was answered by {answers}")

    def _fall_backs(self) -> list[CheckpointId]:
        events = self.oracle.events(RestoreFellBack)
        return [CheckpointId(event.candidate_attempt, event.candidate_step) for event in events]

    def _answers(self) -> list[CommandApplied | CommandRefused]:
        return self.oracle.events(CommandApplied, CommandRefused)

    def _told(self, what: str) -> str:
        log = self._log.read_text()[-3000:] if self._log.exists() else ""
        return "\n".join([what, *self._story, log])

    # Harm.

    def _damage(self, damage: Damage) -> None:
        """Harm a file of a checkpoint that is whole: a second harm might undo the first."""
        oracle = self.oracle
        whole = [i for i in oracle.committed() if not oracle.is_unusable(i)]
        if not whole:
            return
        checkpoint = whole[damage.checkpoint % len(whole)]
        patterns = ("manifest.json", "*.safetensors", "rank-*.json")
        files = [path for pattern in patterns for path in sorted(oracle.path(checkpoint).glob(pattern))]
        path = files[damage.file % len(files)]
        _harm(path, damage)
        self._story.append(f"  {damage.how}: {path.parent.name}/{path.name}")
        if path.name == "manifest.json" and damage.how == "delete":
            oracle.forget(checkpoint)
        else:
            oracle.note_unusable(checkpoint)

    def _drop(self, drop: Drop) -> None:
        """Lose staging memory; the drain dies with it."""
        self._drain.kill()
        buffers = sorted(self.oracle.staging.glob("*.stage"))
        if drop.what == "folder":
            shutil.rmtree(self.oracle.staging, ignore_errors=True)
        elif buffers and drop.what == "buffer":
            buffers[drop.buffer % len(buffers)].unlink()
        elif buffers:
            _tear_header(buffers[drop.buffer % len(buffers)])

    def _touch(self, touch: Touch) -> None:
        root = self.oracle.store.root
        paths = sorted(root.rglob("*"), key=lambda path: path.relative_to(root).parts)
        source = random.Random(len(paths))
        for age, path in enumerate(paths):
            seconds = {"equal": 0, "reversed": -age, "random": source.randrange(100_000)}[touch.order]
            os.utime(path, (1_700_000_000 + seconds,) * 2)

    def _prune(self, prune: Prune) -> None:
        """Remove what is not among the last ones; whatever happens to the process, those stay, and nothing is torn."""
        oracle = self.oracle
        before = {path.name: _sizes(path) for path in oracle.store.root.glob("step-*")}
        # What an earlier one, killed on the way, has moved may come back.
        before |= {path.name: _sizes(path) for path in oracle.store.root.glob("trash/step-*") if path.is_dir()}
        current = oracle.on_lineage(oracle.committed())
        arguments = {"root": str(self.root), "keep_last": prune.keep_last, "faults": prune.faults}
        code = self._forge.fork("prune", arguments, log=self._log).wait(PATIENCE_SECONDS)
        assert code == 0 or prune.faults, self._told(f"prune ended with {code}")
        after = oracle.committed()
        self._story.append(f"  exit code {code}, {len(before)} before, {len(after)} after")
        lost = set(current[: prune.keep_last]) - set(after)
        assert not lost, self._told(f"{lost} were removed")
        for path in map(oracle.path, after):
            assert _sizes(path) == before[path.name], self._told(f"{path} is torn")
        if code == 0:
            assert oracle.store.list("trash") == [], self._told("something is left in the trash")


def _lines(out: Path) -> list[dict[str, Any]]:
    text = out.read_text() if out.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _sizes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in folder.iterdir()}


def _harm(path: Path, damage: Damage) -> None:
    data = bytearray(path.read_bytes())
    at = min(int(damage.where * len(data)), len(data) - 1)
    if damage.how == "delete":
        path.unlink()
        return
    if damage.how == "flip":
        data[at] ^= 0x10
    elif damage.how == "truncate":
        del data[at:]
    elif damage.how == "empty":
        data.clear()
    else:
        data.append(0)
    path.write_bytes(data)


def _tear_header(path: Path) -> None:
    """Leave both header slots half written."""
    with path.open("r+b") as file:
        for slot in (0, 4096):
            file.seek(slot + 16)
            file.write(os.urandom(8))
