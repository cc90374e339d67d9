"""The base of everything that people write into a spec or a policy file."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A part of a spec: unknown keys are refused, and the docstring below a field is what `spec keys` prints."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True)
