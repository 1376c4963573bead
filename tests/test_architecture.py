"""The style, held by the test run: who imports whom, what a core may know, how large and of what shape things are.

Services are found in the tree, so a new one is held to the same rules from its first file.
"""

import ast
import importlib
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

import shared.messages

ROOT = Path(__file__).parents[1]
PACKAGES = ("shared", "services", "radixmesh")
SERVICES = sorted(folder.name for folder in (ROOT / "services").iterdir() if list(folder.glob("*.py")))
CORES = sorted((ROOT / "services").glob("*/core.py"))

IMPURE = {"asyncio", "nats", "time", "random", "os", "torch"}
"""I/O, clocks, randomness and tensors: a core gets what it needs as events and arguments."""
MAX_LINES = 400


def sources(*packages: str) -> list[Path]:
    return sorted(path for package in packages for path in (ROOT / package).rglob("*.py"))


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imports(path: Path) -> Iterator[str]:
    """Full names of the modules and members that a file imports when it runs; what only a type checker reads is left out."""

    def visit(nodes: list[ast.stmt]) -> Iterator[str]:
        for node in nodes:
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{relative(path)}:{node.lineno}: imports are absolute"
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
            elif not (isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")):
                yield from visit(
                    [child for child in ast.walk(node) if isinstance(child, ast.stmt) and child is not node]
                )

    yield from visit(ast.parse(path.read_text(encoding="utf-8")).body)


def module_file(name: str) -> Path | None:
    """The file of a module of this project, also when `name` goes on to a member of it."""
    parts = name.split(".")
    if parts[0] not in PACKAGES:
        return None
    for length in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:length])
        for candidate in (path.with_suffix(".py"), path / "__init__.py"):
            if candidate.exists():
                return candidate
    return None


def closure(start: Path) -> dict[Path, Path | None]:
    """All files of the project that `start` imports, directly or not, each with the one that brought it in."""
    found: dict[Path, Path | None] = {start: None}
    queue = [start]
    while queue:
        path = queue.pop()
        for name in imports(path):
            imported = module_file(name)
            if imported is not None and imported not in found:
                found[imported] = path
                queue.append(imported)
    return found


def test_imports_keep_the_contracts() -> None:
    done = subprocess.run(
        [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("core", CORES, ids=relative)
def test_a_core_knows_no_io_clock_randomness_or_tensors(core: Path) -> None:
    for path, importer in closure(core).items():
        for name in imports(path):
            assert name.split(".")[0] not in IMPURE, f"{relative(path)} imports {name}" + (
                f", and {relative(importer)} brings it into {relative(core)}" if importer else ""
            )


@pytest.mark.parametrize("core", CORES, ids=relative)
def test_a_core_has_nothing_to_wait_for(core: Path) -> None:
    for node in ast.walk(ast.parse(core.read_text(encoding="utf-8"))):
        assert not isinstance(node, ast.AsyncFunctionDef | ast.Await), f"{relative(core)}:{node.lineno} waits"


@pytest.mark.parametrize("role", SERVICES)
def test_a_service_has_the_shape_of_all(role: str) -> None:
    folder = ROOT / "services" / role
    for name in ("__init__.py", "__main__.py", "actor.py", "config.py"):
        assert (folder / name).exists(), f"services/{role}/{name} is missing"
    main = ast.parse((folder / "__main__.py").read_text(encoding="utf-8"))
    assert any(isinstance(node, ast.AsyncFunctionDef) and node.name == "build" for node in main.body)
    names = {
        alias.asname or alias.name for node in main.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    names |= {ast.unparse(target) for node in main.body if isinstance(node, ast.Assign) for target in node.targets}
    names |= {ast.unparse(node.target) for node in main.body if isinstance(node, ast.AnnAssign)}
    assert "CONFIG" in names, f"services/{role}/__main__.py has no CONFIG"


@pytest.mark.parametrize("role", SERVICES)
def test_imports_point_one_way_from_main_to_actor_to_core(role: str) -> None:
    folder = ROOT / "services" / role
    for path in sorted(folder.rglob("*.py")):
        names = {name for name in imports(path) if name.startswith(f"services.{role}.")}
        if path.name != "__main__.py":
            assert not any(name.startswith(f"services.{role}.__main__") for name in names), relative(path)
        if path.name == "core.py":
            assert not any(name.startswith(f"services.{role}.actor") for name in names), relative(path)


@pytest.mark.parametrize("path", sources(*PACKAGES), ids=relative)
def test_a_file_is_read_in_one_sitting_and_says_what_it_is(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= MAX_LINES, f"{relative(path)} has {text.count(chr(10))} lines, at most {MAX_LINES}"
    assert not text.strip() or ast.get_docstring(ast.parse(text)), f"{relative(path)} has no docstring"
    assert path.stem not in ("utils", "util", "helpers", "manager", "misc", "common"), (
        f"{relative(path)}: find its noun"
    )


def message_types() -> list[type[msgspec.Struct]]:
    modules = [
        importlib.import_module(f"shared.messages.{info.name}")
        for info in pkgutil.iter_modules(shared.messages.__path__)
    ]
    return [
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, msgspec.Struct) and value.__module__ == module.__name__
    ]


@pytest.mark.parametrize("kind", message_types(), ids=lambda kind: kind.__name__)
def test_a_message_is_frozen_named_by_fields_and_open_to_new_ones(kind: type[msgspec.Struct]) -> None:
    config = kind.__struct_config__
    assert config.frozen, "a message that has been sent does not change"
    assert not config.forbid_unknown_fields, "an older receiver must read a newer sender"
    assert kind.__module__.startswith("shared.messages.")


def test_importing_the_frontend_or_a_light_service_does_not_import_torch() -> None:
    light = [
        f"services.{role}.__main__"
        for role in SERVICES
        if role != "worker" and (ROOT / "services" / role / "__main__.py").exists()
    ]
    program = "import importlib, sys\n" + "".join(
        f"importlib.import_module({name!r})\n" for name in ["radixmesh", *light]
    )
    program += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT).returncode == 0
