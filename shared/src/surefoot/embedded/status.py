"""How the stack of a home folder is: what its supervisor says, and what each service says of itself."""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

from surefoot.embedded.child import answers_http
from surefoot.embedded.layout import Layout
from surefoot.embedded.plan import PlanUnreadable, Readiness, Service, read_plan
from surefoot.embedded.server import answers_ping
from surefoot.embedded.stack_file import ServiceState, ServiceStatus, Stack, StackState, running_stack
from surefoot.telemetry.health import HealthState, read_health


class ServiceReport(NamedTuple):
    """One service.

    Attributes:
        name: Of the service.
        state: What the supervisor says; `ready` and what the service says of itself otherwise.
        healthy: Whether all is well with it.
        detail: What is not.
        pid: 0: it is not running.
        restarts: How often it was started again.
        seconds: Since when it is in its state.
    """

    name: str
    state: str
    healthy: bool
    detail: str
    pid: int
    restarts: int
    seconds: float


class StackReport(NamedTuple):
    """The stack.

    Attributes:
        stack: None: none runs.
        services: In the order of the plan, without chores.
    """

    stack: Stack | None
    services: list[ServiceReport]

    @property
    def healthy(self) -> bool:
        """Whether the stack runs and all is well with each of its services."""
        is_up = self.stack is not None and self.stack.state is StackState.RUNNING
        return is_up and all(service.healthy for service in self.services)


def report(home: Path) -> StackReport:
    """Look at a stack. Asks every service; takes a second at most for each that does not answer."""
    stack = running_stack(home)
    if stack is None:
        return StackReport(None, [])
    layout = Layout(home)
    try:
        plan = read_plan(layout.plan_file)
    except PlanUnreadable as error:
        return StackReport(stack, [ServiceReport("plan", "unreadable", False, str(error), 0, 0, 0.0)])
    services = [service for service in plan.services if service.ready is not Readiness.ENDED]
    return StackReport(
        stack, [_report(layout, service, stack.services.get(service.name, ServiceStatus())) for service in services]
    )


def _report(layout: Layout, service: Service, status: ServiceStatus) -> ServiceReport:
    state, detail = str(status.state), status.detail
    healthy = status.state is ServiceState.READY
    if healthy:
        state, detail = _own_word(layout, service)
        healthy = state == ServiceState.READY
    seconds = time.monotonic() - status.since_seconds
    return ServiceReport(service.name, state, healthy, detail, status.pid, status.restarts, seconds)


def _own_word(layout: Layout, service: Service) -> tuple[str, str]:
    """Return `ready`, or what is wrong and the detail."""
    if service.ready is Readiness.ANSWERS and not answers_ping(service.url):
        return "silent", f"does not answer at {service.url}"
    if service.ready is Readiness.HEALTH:
        health = read_health(layout.health, service.name)
        if health.state is not HealthState.OK:
            return str(health.state), health.detail
        if service.url and not answers_http(service.url):
            return "silent", f"does not answer at {service.url}"
    return str(ServiceState.READY), ""
