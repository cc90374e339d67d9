"""Reading a job's entrypoint without running it: does it exist, does it parse, can its imports be found?

Nothing of the user's is imported here: importlib's find_spec looks modules up, and only by top-level name,
because looking up `a.b` would import `a`.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from surefoot.errors import UsageError
from surefoot.spec import JobSpec

RECIPE_MODULE = "surefoot_worker.recipe"
KEY = "entrypoint"
ALLOWED = "allowed: `script.py [args]` or `-m package.module [args]`"


def is_recipe(spec: JobSpec) -> bool:
    """Return whether the job runs the built-in LLM recipe."""
    return _words(spec)[:2] == ["-m", RECIPE_MODULE]


def require_package(name: str, remedy: str) -> None:
    """Refuse the job when a Python package that the ranks need is not installed.

    Raises:
        UsageError: the package cannot be found.
    """
    if _find_top_level(name) is None:
        raise UsageError(KEY, f"needs the Python package {name}, which is not installed: {remedy}")


def check_entrypoint(spec: JobSpec) -> None:
    """Refuse an entrypoint that cannot start.

    Raises:
        UsageError: it does not exist, does not parse, or imports a module that cannot be found.
    """
    words = _words(spec)
    if words[0] == "-m":
        if len(words) < 2:
            raise UsageError(KEY, f"names no module after -m; {ALLOWED}")
        with _import_path([Path.cwd(), *_extra_path(spec)]):
            _check_module(words[1])
        return
    script = Path(words[0])
    if not script.is_file():
        interpreter = script.name.startswith(("python", "torchrun"))
        hint = " (give the script itself, without the interpreter)" if interpreter else ""
        raise UsageError(KEY, f"there is no script {words[0]!r} in {Path.cwd()}{hint}; {ALLOWED}")
    with _import_path([script.absolute().parent, *_extra_path(spec)]):
        _check_source(script)


def _words(spec: JobSpec) -> list[str]:
    try:
        words = spec.entrypoint_words
    except ValueError as error:
        raise UsageError(KEY, f"cannot be split into words: {error}; {ALLOWED}") from None
    if not words or not words[0] or any("\0" in word for word in words):
        raise UsageError(KEY, f"is empty or holds a NUL byte; {ALLOWED}")
    if words[0].startswith("-") and words[0] != "-m":
        raise UsageError(KEY, f"starts with the option {words[0]}; {ALLOWED}")
    return words


def _extra_path(spec: JobSpec) -> list[Path]:
    return [Path(part) for part in spec.env.get("PYTHONPATH", "").split(":") if part]


@contextmanager
def _import_path(folders: list[Path]) -> Iterator[None]:
    """Look for modules where the rank will: the script's folder, or the current one with -m, comes first."""
    before = sys.path[:]
    sys.path[:0] = [str(folder) for folder in folders]
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path[:] = before


def _find_top_level(name: str) -> ModuleSpec | None:
    if name in sys.modules:  # find_spec would raise for one without __spec__, such as __main__
        return sys.modules[name].__spec__ or ModuleSpec(name, None)
    return importlib.util.find_spec(name)


def _check_module(name: str) -> None:
    found = _find_module(name)
    if found is not None and found.submodule_search_locations is not None:  # a package runs its __main__
        name = f"{name}.__main__"
        found = PathFinder.find_spec(name, list(found.submodule_search_locations))
    if found is None:
        raise UsageError(KEY, f"no module named {name!r} in the installed packages or {Path.cwd()}; {ALLOWED}")
    if found.origin is not None and found.origin.endswith(".py"):
        _check_source(Path(found.origin))


def _find_module(name: str) -> ModuleSpec | None:
    first, *rest = name.split(".")
    if not all(part.isidentifier() for part in (first, *rest)):
        return None
    found = _find_top_level(first)
    path = first
    for part in rest:
        if found is None or found.submodule_search_locations is None:
            return None
        path = f"{path}.{part}"
        found = PathFinder.find_spec(path, list(found.submodule_search_locations))
    return found


def _check_source(path: Path) -> None:
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(path.read_bytes(), str(path))
    except OSError as error:
        raise UsageError(KEY, f"{path} cannot be read: {error.strerror}") from None
    except SyntaxError as error:
        raise UsageError(KEY, f"{path}, line {error.lineno}: {error.msg}") from None
    except ValueError as error:
        raise UsageError(KEY, f"{path} is not Python source: {error}") from None
    if any(_changes_sys_path(node) for node in ast.walk(tree)):
        return  # its imports may be found in places that only running it can tell
    for name, line in _unconditional_imports(tree):
        if _find_top_level(name) is None:
            raise UsageError(KEY, f"{path}, line {line}: imports {name!r}, which is not installed")


def _changes_sys_path(node: ast.AST) -> bool:
    return (isinstance(node, ast.Attribute) and node.attr in {"path", "meta_path", "addsitedir"}
            and isinstance(node.value, ast.Name) and node.value.id in {"sys", "site"})  # fmt: skip


def _unconditional_imports(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield (top-level package, line) of the imports that run first whatever happens."""
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from ((alias.name.partition(".")[0], node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.partition(".")[0], node.lineno
