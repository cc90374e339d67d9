"""What must be the same at every start of a job for its resume to be exact."""

from __future__ import annotations

from typing import Any

from surefoot.errors import UsageError


class Constant:
    """A value that is stored in every checkpoint and compared when one is loaded; a state object for `attach`.

    Args:
        key: The setting it comes from, named in the error.
        value: Plain data: a number, a string.
        why: What would go wrong with another value, for the error.
    """

    def __init__(self, key: str, value: Any, why: str) -> None:
        self._key = key
        self._value = value
        self._why = why

    def state_dict(self) -> dict[str, Any]:
        """Return the value."""
        return {"value": self._value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Compare.

        Raises:
            UsageError: the checkpoint was made with another value.
        """
        stored = state_dict["value"]
        if stored != self._value:
            raise UsageError(
                self._key,
                f"is {self._value!r} but this job was trained with {stored!r}; {self._why}. Put it back, give the "
                "job another name, or start over with --from-seed",
            )
