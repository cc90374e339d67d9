"""Every field of the spec says what it is: a docstring right below it."""

from __future__ import annotations

import ast
import inspect
from itertools import pairwise

import pytest
from pydantic import BaseModel

from surefoot import policy, spec

SECTIONS = [
    value
    for module in (spec, policy)
    for value in vars(module).values()
    if inspect.isclass(value) and issubclass(value, BaseModel) and value.__module__ == module.__name__
]


def documented_fields(section: type[BaseModel]) -> dict[str, str]:
    body = next(
        node.body
        for node in ast.walk(ast.parse(inspect.getsource(inspect.getmodule(section))))
        if isinstance(node, ast.ClassDef) and node.name == section.__name__
    )
    return {
        field.target.id: text.value.value
        for field, text in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.__name__)
def test_every_field_is_documented(section: type[BaseModel]) -> None:
    documented = documented_fields(section)
    undocumented = set(section.model_fields) - set(documented)
    assert not undocumented, f"{section.__name__}: no docstring below {sorted(undocumented)}"
    assert all(text.strip().endswith(".") for text in documented.values())


def test_the_sections_were_found() -> None:
    assert {"JobSpec", "CheckpointSpec", "RecipeSpec", "ModelSpec", "PolicySpec", "RungSpec"} <= {
        section.__name__ for section in SECTIONS
    }
