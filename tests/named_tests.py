"""Tests by name: `tests/unit/store/test_lock.py::test_a_zombie_is_dead`, or one of a class, `…::TestSeeds::test_…`."""

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).parents[1]


@functools.cache
def names_in(path: str) -> frozenset[str]:
    """Test functions of a file under the repository, methods as Class::name; empty where there is no such file."""
    if not (ROOT / path).is_file():
        return frozenset()
    tree = ast.parse((ROOT / path).read_text())
    found = {node.name for node in tree.body if _is_test(node)}
    for kind in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        found |= {f"{kind.name}::{node.name}" for node in kind.body if _is_test(node)}  # type: ignore[attr-defined]
    return frozenset(found)


def exists(name: str) -> bool:
    """Whether `path::name` is a test."""
    path, _, function = name.partition("::")
    return function in names_in(path)


def _is_test(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")


@functools.cache
def told(name: str) -> str:
    """What is said of a test that exists: its name, its docstring, and those of its class."""
    path, *names = name.split("::")
    nodes: list[ast.stmt] = ast.parse((ROOT / path).read_text()).body
    words = []
    for wanted in names:
        node = next(n for n in nodes if isinstance(n, ast.ClassDef | ast.FunctionDef) and n.name == wanted)
        words += [wanted, ast.get_docstring(node) or ""]
        nodes = node.body
    return "\n".join(words)
