from __future__ import annotations

from typing import Generic, TypeVar

V = TypeVar("V")


class Recent(Generic[V]):
    """A mapping that forgets what was put longest ago.

    Args:
        max_items: How many it keeps.
    """

    def __init__(self, max_items: int) -> None:
        self._max_items = max_items
        self._items: dict[str, V] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._items

    def get(self, key: str) -> V | None:
        """Return the value, None when it is not there."""
        return self._items.get(key)

    def put(self, key: str, value: V) -> None:
        """Put or replace it; it is the newest now."""
        self._items.pop(key, None)
        self._items[key] = value
        if len(self._items) > self._max_items:
            del self._items[next(iter(self._items))]
