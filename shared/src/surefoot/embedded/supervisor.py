"""Runs the services of a plan: starts them when what they need is ready, again when they end, ends them in order.

One thread, woken by what happens: output, the end of a process, a signal. Every service dies with it (prctl(2),
PR_SET_PDEATHSIG), so that nothing is left whatever becomes of it.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import structlog

from surefoot.checkpoint.locks import LockedFile
from surefoot.embedded.child import Child
from surefoot.embedded.layout import Layout
from surefoot.embedded.plan import Plan, Service
from surefoot.embedded.stack_file import ServiceState, Stack, StackState
from surefoot.errors import EXIT_FAILED, EXIT_OK, EXIT_USAGE, SurefootError

MAX_FAILED_STARTS = 3
"""A service that was never ready and has ended so often stops the start of the stack."""
LOOK_SECONDS = 0.03
"""Between two looks whether a service is ready, while one is starting."""
IDLE_SECONDS = 5.0

log = structlog.get_logger(__name__)


class AlreadySupervised(SurefootError):
    """Another supervisor has this home folder."""


class Supervisor:
    """Supervises the services of one plan. Main thread of a process that starts no other thread.

    Args:
        plan: What to run.
        on_change: Called after every change of the stack file.

    Raises:
        AlreadySupervised: another one is at work in the plan's home folder.
    """

    def __init__(self, plan: Plan, on_change: Callable[[Stack], None] | None = None) -> None:
        self._plan, self._on_change = plan, on_change
        layout = Layout(Path(plan.home))
        layout.make()
        self._lock = LockedFile.open(layout.lock_file, create=True)
        other = self._lock.try_own()
        if other is not None:
            raise AlreadySupervised(f"process {other} supervises {layout.home}")
        plan.write(layout.plan_file)
        environment = os.environ | plan.environment
        self._children = {
            service.name: Child(service, environment, layout.log_file(service.name), layout.health)
            for service in plan.services
        }
        statuses = {name: child.status for name, child in self._children.items()}
        self.stack = Stack(os.getpid(), str(layout.home), plan.urls, plan.token_file, StackState.STARTING, statuses)
        self._stop_asked = False
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def run(self) -> int:
        """Run until SIGTERM or SIGINT.

        Returns:
            0: everything was stopped in good order; 1: a service did not get ready, or did not end well.
        """
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        self._publish()
        deadline = time.monotonic() + self._plan.start_seconds
        while not self._stop_asked and self.stack.state is not StackState.FAILED:
            if self._turn():
                self._publish()
            if self.stack.state is StackState.STARTING:
                self._judge_start(deadline)
            self._wait()
        return self._stop()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self._stop_asked = True

    def _turn(self) -> bool:
        changed = False
        for child in self._children.values():
            if child.reap():
                changed = True
                self._tell_end(child)
            if self._may_start(child):
                child.start()
                changed = True
                log.info("started", part=child.service.name, pid=child.status.pid)
            changed = child.look() or changed
        return changed

    def _tell_end(self, child: Child) -> None:
        if child.status.state is not ServiceState.DONE:
            log.warning("a service has ended", part=child.service.name, how=child.status.detail)

    def _may_start(self, child: Child) -> bool:
        if child.status.state is ServiceState.BACKING_OFF:
            return time.monotonic() >= child.next_start
        gates_open = all(self._children[name].was_ready for name in child.service.after)
        return child.status.state is ServiceState.WAITING and gates_open

    def _judge_start(self, deadline: float) -> None:
        children = self._children.values()
        if all(child.was_ready for child in children):
            self._put(StackState.RUNNING)
            log.info("all services are ready")
            return
        lost = [c for c in children if c.num_failed_starts >= MAX_FAILED_STARTS or _is_hopeless(c)]
        if time.monotonic() >= deadline:
            lost = lost or [c for c in children if not c.was_ready and c.status.state is not ServiceState.WAITING]
        if lost:
            self.stack.failed = [child.service.name for child in lost]
            self.stack.detail = "; ".join(f"{child.service.name} {_why(child)}" for child in lost)
            self._put(StackState.FAILED)
            log.error("the stack is stopped again", error=self.stack.detail)

    def _stop(self) -> int:
        failed = self.stack.state is StackState.FAILED
        if not failed:
            self._put(StackState.STOPPING)
        for group in stop_order(self._plan.services):
            self._stop_group([self._children[name] for name in group])
        for child in self._children.values():
            child.close()
        if not failed:
            self._put(StackState.STOPPED)
        self._lock.close()
        return EXIT_FAILED if failed or self.stack.failed else EXIT_OK

    def _stop_group(self, children: list[Child]) -> None:
        for child in children:
            child.send_stop()
        while any(child.is_alive for child in children):
            for child in self._children.values():
                if child.reap() and child in children:
                    self._note_end(child)
            for child in children:
                if child.kill_if_late():
                    log.error("a service does not end and is killed", part=child.service.name)
            self._publish()
            self._wait()

    def _note_end(self, child: Child) -> None:
        log.info("stopped", part=child.service.name, how=child.status.detail)
        if self.stack.state is StackState.STOPPING and child.last_exit not in (EXIT_OK, -signal.SIGTERM):
            self.stack.failed.append(child.service.name)
            self.stack.detail = "; ".join(f"{name} {self._children[name].status.detail}" for name in self.stack.failed)

    def _wait(self) -> None:
        """Wait until something happens, and carry logs meanwhile."""
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        writers = {}
        for child in self._children.values():
            for descriptor in child.descriptors:
                poll.register(descriptor, select.POLLIN)
                writers[descriptor] = child
        for descriptor, _ in poll.poll(1000 * self._wait_seconds()):
            if descriptor == self._wake_read:
                os.read(self._wake_read, 4096)
            else:
                writers[descriptor].pump_log()

    def _wait_seconds(self) -> float:
        states = {child.status.state for child in self._children.values()}
        if ServiceState.STARTING in states or self.stack.state in (StackState.STOPPING, StackState.FAILED):
            return LOOK_SECONDS
        now = time.monotonic()
        due = [c.next_start - now for c in self._children.values() if c.status.state is ServiceState.BACKING_OFF]
        return max(0.0, min([IDLE_SECONDS, *due]))

    def _put(self, state: StackState) -> None:
        self.stack.state = state
        self._publish()

    def _publish(self) -> None:
        try:
            self.stack.write()
        except OSError as error:  # disk full: supervising goes on
            log.error("the stack file cannot be written", error=str(error))
        if self._on_change is not None:
            self._on_change(self.stack)


def stop_order(services: tuple[Service, ...]) -> list[list[str]]:
    """Return names in groups, each to be stopped when those before it have ended: nobody loses what it needs."""
    left = {service.name: service for service in services}
    groups = []
    while left:
        needed = {name for service in left.values() for name in (*service.after, *service.outlived_by)}
        group = [name for name in left if name not in needed]
        if not group:
            raise ValueError(f"services need each other in a circle: {', '.join(left)}")
        groups.append(group)
        for name in group:
            del left[name]
    return groups


def _is_hopeless(child: Child) -> bool:
    # Bad settings do not get better.
    return child.num_failed_starts > 0 and child.last_exit == EXIT_USAGE


def _why(child: Child) -> str:
    if child.num_failed_starts:
        return child.status.detail
    return f"is not ready after {time.monotonic() - child.status.since_seconds:.0f} s"
