"""Entry point of the detector: the one place where its parts are built and connected."""

from __future__ import annotations

from surefoot.bus.consumer import Consumer
from surefoot.bus.publisher import Publisher
from surefoot.bus.redis_bus import RedisBus
from surefoot.bus.streams import EVENTS
from surefoot.runtime import Runtime, Turn, run_service
from surefoot.settings import load_settings
from surefoot_detector.handlers import handlers
from surefoot_detector.replay import Replay
from surefoot_detector.settings import DetectorSettings
from surefoot_detector.watch import Watch

NAME = "detector"
GROUP = "detector"
CONSUMER = "detector"
"""Always the same: there is one at a time, and the next one finds what the last one left undone."""


def main() -> int:
    """Run the detector until SIGTERM; return its exit code."""
    settings = load_settings(DetectorSettings)

    def build(runtime: Runtime) -> Turn:
        bus = RedisBus(settings.redis_url)
        runtime.on_exit.callback(bus.close)
        watch = Watch(Publisher(bus, NAME).publish_all, settings.detector_max_jobs)
        reader = bus.group(EVENTS, GROUP, CONSUMER)
        replay = Replay(bus, reader, watch)
        consumer = Consumer(reader, handlers(watch), watch.lose)

        def turn() -> None:
            if replay.is_over:
                watch.send()
                consumer.turn()
            else:
                replay.turn()

        return turn

    return run_service(NAME, settings, build)
