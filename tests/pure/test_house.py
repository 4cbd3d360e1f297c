"""The rules of the house that no other tool checks."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "planloom"
SOURCES = sorted(PACKAGE.rglob("*.py"))
OWN_FOLDERS = ("src", "tests", "examples", "benchmarks", "testbed")

WITH_TORCH = ("capture", "execute", "profile", "train")
WITH_PRIVATE_TORCH = ("capture", "execute")
MAX_LINES = 600


def is_private(dotted: str) -> bool:
    """Whether a dotted name has a private part: `torch._C` has, `torch.__version__` has not."""
    return any(part.startswith("_") and not part.endswith("__") for part in dotted.split("."))


def private_torch_names(source: str) -> list[str]:
    """Every private name of torch in a source, with its line: imported, reached by attributes, or named in a string."""
    tree = ast.parse(source)
    found: list[tuple[int, str]] = []
    meaning: dict[str, str] = {}  # local name -> the dotted name in torch that it stands for
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    found.append((node.lineno, alias.name))
                    meaning[alias.asname or "torch"] = alias.name if alias.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                found.append((node.lineno, f"{node.module}.{alias.name}"))
                meaning[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Constant) and re.fullmatch(r"torch(\.\w+)+", str(node.value)):
            found.append((node.lineno, str(node.value)))  # import_module("torch._dynamo")
    for node in ast.walk(tree):
        parts: list[str] = []
        inner: ast.expr | None = node if isinstance(node, ast.Attribute) else None
        while isinstance(inner, ast.Attribute):
            parts.append(inner.attr)
            inner = inner.value
        if isinstance(inner, ast.Name) and inner.id in meaning:
            found.append((inner.lineno, ".".join((meaning[inner.id], *reversed(parts)))))
    return [f"line {line}: {name}" for line, name in sorted(set(found)) if is_private(name)]


@pytest.mark.parametrize(
    "source",
    [
        "import torch._dynamo",
        "import torch._dynamo as dynamo",
        "from torch import _C",
        "from torch._subclasses import FakeTensor",
        "from torch.utils import _pytree as pytree",
        "import torch\ntorch._C._log_api_usage_once('x')",
        "import torch.distributed as dist\ndist.distributed_c10d._get_default_group()",
        "def f():\n    from torch import nn\n    return nn.modules._functions",
        "import importlib\nimportlib.import_module('torch._inductor')",
    ],
)
def test_the_search_for_private_names_finds_them(source: str) -> None:
    assert private_torch_names(source)


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.__version__",
        "import torch.nn.functional as F\nF.relu(x)",
        "from torch import Tensor\nself._torch = Tensor",
        "'''A docstring may speak of torch._C.'''",
        "from planloom.execute import _private",
        "other._C",
    ],
)
def test_the_search_for_private_names_finds_nothing_else(source: str) -> None:
    assert not private_torch_names(source)


def test_private_names_of_torch_are_used_in_capture_and_execute_only() -> None:
    elsewhere = {
        str(path.relative_to(ROOT)): names
        for path in SOURCES
        if path.relative_to(PACKAGE).parts[0] not in WITH_PRIVATE_TORCH
        and (names := private_torch_names(path.read_text(encoding="utf-8")))
    }
    assert not elsewhere


def test_importing_the_command_line_does_not_import_torch() -> None:
    if not (PACKAGE / "cli").is_dir() and not (PACKAGE / "cli.py").is_file():
        pytest.skip("planloom.cli does not exist yet")
    assert modules_loaded_by(["planloom.cli"]).isdisjoint({"torch", "transformers"})


def test_importing_the_packages_without_torch_does_not_import_torch() -> None:
    modules = [
        ".".join(("planloom", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
        for path in SOURCES
        if path.relative_to(PACKAGE).parts[0] not in (*WITH_TORCH, "__main__.py")
    ]
    assert modules_loaded_by(modules).isdisjoint({"torch", "transformers"})


def modules_loaded_by(names: list[str]) -> set[str]:
    """The top-level modules that are loaded in a fresh interpreter after these imports."""
    program = f"import sys; sys.path.insert(0, {str(PACKAGE.parent)!r})\n"
    program += "".join(f"import {name}\n" for name in names)
    program += "print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_no_file_has_a_name_that_says_nothing() -> None:
    files = [path for folder in OWN_FOLDERS for path in (ROOT / folder).rglob("*.py")]
    assert not [str(path) for path in files if path.name in ("utils.py", "common.py", "helpers.py")]


def test_no_source_file_is_too_long() -> None:
    num_lines = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES}
    assert not {path: lines for path, lines in num_lines.items() if lines > MAX_LINES}
