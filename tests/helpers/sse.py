"""A client of Server-Sent Events."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx


class Reader:
    """A client in a thread; it keeps the frames that it gets."""

    def __init__(self, url: str, headers: dict | None = None, **params: str) -> None:
        self.frames: list[dict[str, str]] = []
        self.ended = threading.Event()
        self._client = httpx.Client(timeout=httpx.Timeout(5, read=30))
        self._request = self._client.build_request("GET", url, params=params, headers=headers)
        self.response = self._client.send(self._request, stream=True)
        self.response.raise_for_status()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        frame: dict[str, str] = {}
        try:
            for line in self.response.iter_lines():
                name, _, value = line.partition(": ")
                if line:
                    frame[name or "comment"] = value
                else:
                    self.frames.append(frame)
                    frame = {}
        except (httpx.TransportError, httpx.StreamError):
            pass
        self.ended.set()

    @property
    def stages(self) -> list[str]:
        return [json.loads(frame["data"])["stage"] for frame in list(self.frames) if "data" in frame]

    def close(self) -> None:
        # Closing it here would not wake up the thread that reads.
        with suppress(OSError):
            self.response.extensions["network_stream"].get_extra_info("socket").shutdown(socket.SHUT_RDWR)
        self._thread.join(5)
        self._client.close()


@contextmanager
def reading(url: str, **options: Any) -> Iterator[Reader]:
    reader = Reader(url, **options)
    try:
        yield reader
    finally:
        reader.close()
