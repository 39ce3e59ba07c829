"""The house as a whole: who may import whom, what is declared, and that it can all be imported."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import nbformat
import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

pytestmark = pytest.mark.slow  # processes of their own

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("engine", "kernels", "workbench")
MAY_IMPORT = {"kernels": set(), "engine": {"kernels"}, "workbench": {"engine", "kernels"}}
THIRD_PARTY = {
    "torch", "triton", "numpy", "safetensors", "transformers", "tokenizers", "gguf", "jinja2", "huggingface_hub",
    "xgrammar",
}  # fmt: skip
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def imported(source: str) -> Iterator[tuple[str, int]]:
    """Top-level names of everything a module imports, wherever in it, with the line. Relative imports stay inside."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((alias.name.split(".")[0], node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.split(".")[0], node.lineno
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.args[0].value.split(".")[0], node.lineno


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def offences(package: str, allowed: set[str]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in modules(package)
        for name, line in imported(path.read_text())
        if name not in allowed
    ]


def test_the_scan_sees_every_way_of_importing() -> None:
    source = "import a.b, c\nfrom d.e import f\ndef g():\n    import h\nfrom . import i\nimport_module('j.k')\n"
    assert sorted(name for name, _ in imported(source)) == ["a", "c", "d", "h", "j"]


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_point_one_way(package: str) -> None:
    house = {*PACKAGES, "notebooks", "tests", "runnerscope"}
    allowed = {package, *MAY_IMPORT[package]}
    assert modules(package)
    wrong = [text for text in offences(package, set()) if text.rsplit(" ", 1)[1] in house - allowed]
    assert not wrong, "kernels <- engine <- workbench <- notebooks:\n" + "\n".join(wrong)


@pytest.mark.parametrize("package", ["kernels", "engine"])
def test_engine_and_kernels_need_only_the_allowed_libraries(package: str) -> None:
    allowed = {package, *MAY_IMPORT[package], *sys.stdlib_module_names, *THIRD_PARTY}
    assert not offences(package, allowed)


def test_only_structured_output_needs_xgrammar() -> None:
    users = {text.split(":")[0] for text in offences("engine", set()) if text.endswith(" xgrammar")}
    assert users == {"engine/sample/structured_output.py"}


def test_the_engine_runs_without_jupyter() -> None:
    """Not only by the letter: a process in which Jupyter, widgets and plotly can't be imported loads all of engine."""
    code = (
        "import sys\n"
        "for name in ('IPython', 'ipywidgets', 'anywidget', 'plotly', 'workbench'): sys.modules[name] = None\n"
        "import importlib, pkgutil, engine\n"
        "names = [m.name for m in pkgutil.walk_packages(engine.__path__, 'engine.')]\n"
        "[importlib.import_module(name) for name in names]\n"
        "print(len(names))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 20


@pytest.mark.parametrize("package", PACKAGES)
def test_every_module_can_be_imported(package: str) -> None:
    top = importlib.import_module(package)
    for module in pkgutil.walk_packages(top.__path__, f"{package}."):
        importlib.import_module(module.name)


def test_notebooks_use_only_what_is_public() -> None:
    """A notebook reads the workbench and the engine; it never reaches into a private name."""
    notebooks = sorted((ROOT / "notebooks").glob("*.ipynb"))
    assert notebooks
    for path in notebooks:
        for cell in nbformat.read(path, as_version=4).cells:
            if cell.cell_type == "code":
                private = re.findall(r"(?:from|import)\s+(?:engine|kernels|workbench)[\w.]*\._\w+", cell.source)
                assert not private, f"{path.name}: {private}"


def test_notebooks_are_stored_so_that_nbval_compares_something() -> None:
    """nbval skips a cell that was never run; widget state would weigh megabytes."""
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        assert path.stat().st_size < 200_000, f"{path.name} is {path.stat().st_size:,} bytes"
        notebook = nbformat.read(path, as_version=4)
        assert "widgets" not in notebook.metadata, f"{path.name} carries widget state: save it without"
        assert notebook.metadata.kernelspec.name == "python3"
        runs = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
        in_order = list(range(1, len(runs) + 1))
        assert runs == in_order, f"{path.name}: run all cells in order, then save it; counts are {runs}"


def pins(path: Path) -> dict[str, str]:
    """name -> version of each `name==version` line."""
    lines = (line.split("#")[0].strip() for line in path.read_text().splitlines())
    found = {}
    for line in lines:
        if line and not line.startswith("-"):
            requirement = Requirement(line)
            (specifier,) = requirement.specifier
            assert specifier.operator == "==", line
            found[requirement.name.lower().replace("_", "-")] = specifier.version
    return found


def declared() -> dict[str, SpecifierSet]:
    """name -> range of every dependency and every extra's."""
    extras = [entry for entries in PROJECT["optional-dependencies"].values() for entry in entries]
    requirements = [Requirement(text) for text in [*PROJECT["dependencies"], *extras]]
    return {r.name.lower().replace("_", "-"): r.specifier for r in requirements if r.name != PROJECT["name"]}


def test_constraints_pin_what_is_declared() -> None:
    pinned = pins(ROOT / "constraints.txt")
    assert set(pinned) == set(declared())
    for name, specifier in declared().items():
        assert specifier.contains(pinned[name]), f"{name}=={pinned[name]} is outside {specifier}"


def test_binder_pins_the_same_versions() -> None:
    pinned, ours = pins(ROOT / "binder" / "requirements.txt"), pins(ROOT / "constraints.txt")
    assert pinned.pop("torch") == ours["torch"] + "+cpu"
    assert {name: ours[name] for name in pinned} == pinned
    needed = {Requirement(text).name.lower().replace("_", "-") for text in PROJECT["dependencies"]}
    needed |= {Requirement(text).name.lower() for text in PROJECT["optional-dependencies"]["lab"]}
    assert needed - {"torch"} == set(pinned)
    assert (ROOT / "binder" / "runtime.txt").read_text().strip() == "python-3.11"


def test_what_is_imported_is_declared_and_the_other_way_round() -> None:
    """Each package imports what the base or its extra declares, and nothing is declared in vain."""
    extras = PROJECT["optional-dependencies"]

    def names(entries: list[str]) -> set[str]:
        return {Requirement(text).name.lower().replace("-", "_") for text in entries}

    base = names(PROJECT["dependencies"])
    allowed = {
        "engine": base | names(extras["gpu"]) | names(extras["structured"]),
        "kernels": base | names(extras["gpu"]),
        "workbench": base | names(extras["lab"]),
        "tests": base | names(extras["gpu"]) | names(extras["lab"]) | names(extras["dev"]),
    }
    house = {*PACKAGES, "tests", PROJECT["name"], *sys.stdlib_module_names}
    used: set[str] = set()
    for package, declared_names in allowed.items():
        found = {name for path in modules(package) for name, _ in imported(path.read_text())} - house
        assert found <= declared_names, f"{package} imports {sorted(found - declared_names)}, which it doesn't declare"
        used |= found
    run_not_imported = {"jupyterlab", "nbval", "pytest_xdist", "ruff", "mypy"}
    declared_extras = [entry for name in ("lab", "gpu", "structured", "dev") for entry in extras[name]]
    assert names([*PROJECT["dependencies"], *declared_extras]) - used == {
        *run_not_imported,
        PROJECT["name"],
    }


@pytest.mark.slow
def test_the_wheel_carries_every_file_of_the_packages(tmp_path: Path) -> None:
    """Scripts, styles and configs too, not only what is Python."""
    source = tmp_path / "source"
    source.mkdir()
    for name in (*PACKAGES, "runnerscope.py", "pyproject.toml", "README.md"):
        path, ignore = ROOT / name, shutil.ignore_patterns("__pycache__")
        shutil.copytree(path, source / name, ignore=ignore) if path.is_dir() else shutil.copy(path, source / name)
    expected = {
        str(path.relative_to(source))
        for package in PACKAGES
        for path in (source / package).rglob("*")
        if path.is_file() and path.suffix != ".md"  # notes are for the reader of the source
    }
    command = [
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        str(tmp_path),
        str(source),
    ]
    subprocess.run([sys.executable, *command], check=True, timeout=300, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    carried = set(zipfile.ZipFile(wheel).namelist())
    assert {name.rsplit(".", 1)[-1] for name in expected} >= {"py", "js", "css", "json"}
    assert expected - carried == set()
    assert not [name for name in carried if name.startswith(("tests", "notebooks"))]


def test_the_installed_distribution_is_this_one() -> None:
    assert version(PROJECT["name"]) == PROJECT["version"]


@pytest.mark.slow
def test_readme_example_runs(smollm2: Path) -> None:
    """The Python example of README, exactly as printed there, in a fresh process."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 1
    assert len([line for line in blocks[0].splitlines() if line.strip()]) <= 10
    done = subprocess.run([sys.executable, "-c", blocks[0]], capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout, done.stdout
