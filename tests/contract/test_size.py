"""The code stays in pieces that a person can hold in mind: limits of DESIGN 2, docstrings not counted."""

from __future__ import annotations

import ast
import statistics
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = sorted([*ROOT.glob("shared/src/**/*.py"), *ROOT.glob("services/*/src/**/*.py")])


def functions(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = node.body[0] if ast.get_docstring(node) is not None else None
            documented = docstring.end_lineno - docstring.lineno + 1 if docstring else 0
            yield f"{path.name}:{node.name}", node.end_lineno - node.lineno + 1 - documented


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_no_module_over_400_lines_and_no_function_over_60(path):
    assert len(path.read_text().splitlines()) <= 400
    assert [item for item in functions(path) if item[1] > 60] == []


def test_medians():
    assert statistics.median(len(path.read_text().splitlines()) for path in MODULES) <= 150
    assert statistics.median(lines for path in MODULES for _, lines in functions(path)) <= 10
