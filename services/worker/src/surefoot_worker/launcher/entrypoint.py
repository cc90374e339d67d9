"""What a rank runs as `__main__`, and which modules that file imports when it starts."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import sys
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path


@dataclass(frozen=True)
class Entrypoint:
    """The words of a spec's `entrypoint`, taken apart.

    Args:
        target: A module name or the path of a script, as the user wrote it.
        arguments: What the program sees in `sys.argv[1:]`.
        is_module: Whether it is to be run as with `python -m`.
    """

    target: str
    arguments: tuple[str, ...]
    is_module: bool

    @classmethod
    def parse(cls, words: list[str]) -> Entrypoint:
        """Take the words apart; `surefoot.preflight` has checked them."""
        if words[0] == "-m":
            return cls(words[1], tuple(words[2:]), is_module=True)
        return cls(words[0], tuple(words[1:]), is_module=False)

    def path0(self) -> str:
        """Return what Python puts first in sys.path: the script's folder, or the current one with -m."""
        return str(Path.cwd() if self.is_module else Path(self.target).resolve().parent)

    def module_path(self, python_path: str = "") -> list[str]:
        """Return sys.path of a Python that was started with this entrypoint in place of the present program.

        Args:
            python_path: PYTHONPATH of the job's own environment; that of this process is in its sys.path already.
        """
        rest = sys.path if sys.flags.safe_path else sys.path[1:]
        return [self.path0(), *(entry for entry in (*python_path.split(os.pathsep), *rest) if entry)]


@dataclass(frozen=True)
class Import:
    """One top-level import statement: `import module` or `from module import names`."""

    module: str
    names: tuple[str, ...] = ()

    def perform(self) -> None:
        """Do what the statement does, without binding names.

        Names are looked up as well: packages such as transformers load their parts at that moment.
        """
        module = importlib.import_module(self.module)
        for name in self.names:
            if not hasattr(module, name):
                importlib.import_module(f"{self.module}.{name}")


def imports_of(entrypoint: Entrypoint) -> list[Import]:
    """Return the top-level imports of the file that will run as `__main__`, without running it.

    The file itself is not among them: it runs once, as `__main__`, in each rank. sys.path must already be the
    rank's. A file that cannot be found or parsed has none; the rank will report that.
    """
    source, package = _locate(entrypoint)
    if source is None:
        return []
    try:
        tree = ast.parse(source.read_bytes(), str(source))
    except (OSError, SyntaxError, ValueError):
        return []
    return [found for node in tree.body for found in _imports_in(node, package)]


def _locate(entrypoint: Entrypoint) -> tuple[Path | None, str]:
    if not entrypoint.is_module:
        return Path(entrypoint.target), ""
    found = importlib.util.find_spec(entrypoint.target)  # imports the parent packages, as `python -m` does
    package = entrypoint.target.rpartition(".")[0]
    if found is not None and found.submodule_search_locations is not None:
        package = entrypoint.target
        importlib.import_module(package)
        found = PathFinder.find_spec(f"{package}.__main__", list(found.submodule_search_locations))
    origin = found.origin if found is not None else None
    return (Path(origin) if origin is not None and origin.endswith(".py") else None), package


def _imports_in(node: ast.stmt, package: str) -> list[Import]:
    if isinstance(node, ast.Import):
        return [Import(alias.name) for alias in node.names]
    if not isinstance(node, ast.ImportFrom) or node.module == "__future__":
        return []
    module = node.module or ""
    if node.level:
        module = importlib.util.resolve_name("." * node.level + module, package)
    return [Import(module, tuple(alias.name for alias in node.names if alias.name != "*"))]
