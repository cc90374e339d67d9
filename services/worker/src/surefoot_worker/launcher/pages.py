"""What ranks and launcher tell each other through memory: progress pages and the control page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from surefoot.progress import Control, ControlPage, Progress, ProgressReader, control_path, progress_path


class Pages:
    """The pages of one job on this node, from the launcher's side. Main thread only.

    Args:
        folder: The job's staging folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._control = ControlPage.create(control_path(folder))
        self._asked = Control()
        self._readers: dict[int, ProgressReader] = {}
        self._control.write(self._asked)

    def request_stop(self) -> None:
        """Ask the ranks to save, stop at the next step boundary and exit 0."""
        self._ask(replace(self._asked, stop_requested=True))

    def request_save(self) -> None:
        """Ask the ranks to save now."""
        self._ask(replace(self._asked, save_requests=self._asked.save_requests + 1))

    def any_attached(self, pids: Mapping[int, int]) -> bool:
        """Tell whether one of these ranks (pid by rank) uses the sdk: only those read requests."""
        return any(self.progress(pids).values())

    def progress(self, pids: Mapping[int, int]) -> dict[int, Progress | None]:
        """Return where these ranks (pid by rank) are; None for one that has not attached."""
        return {rank: self._progress(rank, pid) for rank, pid in pids.items()}

    def attempt_and_step(self, rank: int, pids: Mapping[int, int]) -> tuple[int | None, int | None]:
        """Return the attempt that these ranks (pid by rank) train in, and the last step that `rank` completed."""
        pages = self.progress(pids)
        attempts = [page.attempt for page in pages.values() if page is not None and page.attempt]
        own = pages[rank]
        step = own.step if own is not None and own.start_step >= 0 else None
        return max(attempts, default=None), step

    def _ask(self, control: Control) -> None:
        self._asked = control
        self._control.write(control)

    def _progress(self, rank: int, pid: int) -> Progress | None:
        found = self._readers.setdefault(rank, ProgressReader(progress_path(self._folder, rank))).read()
        return found if found is not None and found.pid == pid else None  # else it is of an earlier process
