"""Modules that call themselves pure are: no clock, no I/O, no asyncio, no torch, and no import of a module that is not.

Purity is what lets a test, a simulator and a run drive the same code.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
IMPURE = {
    "aiohttp", "asyncio", "ctypes", "deepspeed", "fcntl", "http", "logging", "mmap", "multiprocessing", "os", "psutil",
    "random", "resource", "select", "selectors", "shutil", "signal", "socket", "socketserver", "submitit", "subprocess",
    "tempfile", "threading", "torch", "transformers", "urllib.request", "vllm",
}  # fmt: skip
CLOCKS = {("time", name) for name in ("time", "monotonic", "sleep", "perf_counter")} | {("datetime", "now")}
#: Imported for a plain type alone.
EXCEPT = {"gyre.proxy.answer": {"gyre.proxy.recorder"}}


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def docstring(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text())) or ""


MODULES = {name_of(path): path for path in sorted((ROOT / "gyre").rglob("*.py"))}
PURE = {name for name, path in MODULES.items() if re.search(r"\bPure\b[.:,]", docstring(path))}


def imports(tree: ast.Module) -> set[str]:
    """Modules that are imported, types of `if TYPE_CHECKING` included: what is named there is depended on too."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found |= {f"{node.module}.{a.name}" for a in node.names if f"{node.module}.{a.name}" in MODULES}
    return found


def test_there_are_pure_modules() -> None:
    assert {"gyre.events", "gyre.metrics", "gyre.scheduler.state", "gyre.training.ledger"} <= PURE


@pytest.mark.parametrize("name", sorted(PURE))
def test_pure_modules_are_pure(name: str) -> None:
    tree = ast.parse(MODULES[name].read_text())
    allowed = EXCEPT.get(name, set())
    for imported in imports(tree) - allowed:
        if imported == "gyre" or imported.startswith("gyre."):
            package = imported in MODULES and MODULES[imported].name == "__init__.py"
            assert package or imported in PURE, f"{name} is pure but imports {imported}"
        else:
            assert imported not in IMPURE and imported.split(".")[0] not in IMPURE, f"{name} imports {imported}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            assert (node.value.id, node.attr) not in CLOCKS, f"{name} looks at a clock, line {node.lineno}"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in {"open", "print", "input"}, f"{name} does I/O, line {node.lineno}"


@pytest.mark.parametrize("library, owners", [("vllm", {"gyre.cell"}), ("deepspeed", {"gyre.training"})])
def test_each_big_library_has_one_room(library: str, owners: set[str]) -> None:
    for name, path in MODULES.items():
        if any(i.split(".")[0] == library for i in imports(ast.parse(path.read_text()))):
            assert name.rpartition(".")[0] in owners, f"{name} imports {library}"
