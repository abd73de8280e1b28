"""The tree is what docs/architecture.md says: import arrows, names that nobody else claims, files of readable size."""

import ast
import importlib.util
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAY_IMPORT: dict[str, set[str]] = {
    "moe_kernels": set(),
    "model": {"moe_kernels"},
    "data": set(),
    "checkpoint": {"model", "moe_kernels"},
    "training": {"model", "data", "checkpoint", "moe_kernels"},
    "evaluation": {"model", "data", "checkpoint", "training", "moe_kernels"},
    # Plans count from configurations and refuse what train.py refuses; the doctor runs a layer on each machine.
    "launch": {"training.config", "training.build", "training.parallel", "training.world", "model", "moe_kernels"},
}
OURS = {*MAY_IMPORT, "tests", "benchmarks", "docs", "configs", "train"}
MAX_LINES, MAX_KERNEL_LINES = 400, 1200


def imported_modules(path: Path) -> set[str]:
    modules: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write the full name"
            modules.add(node.module or "")
    return modules


def forbidden_imports(folder: str, root: Path) -> list[str]:
    allowed = MAY_IMPORT[folder] | {folder}
    found = []
    for path in sorted((root / folder).rglob("*.py")):
        for module in sorted(imported_modules(path)):
            if module.split(".")[0] not in OURS:
                continue
            if not any(module == name or module.startswith(name + ".") for name in allowed):
                found.append(f"{path.relative_to(root)} imports {module}")
    return found


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_imports_follow_the_arrows(folder: str) -> None:
    assert (ROOT / folder).is_dir()
    assert forbidden_imports(folder, ROOT) == []


def test_an_import_against_the_arrows_is_found(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "order.py").write_text("from training.config import RunConfig\nimport json\n")
    assert forbidden_imports("data", tmp_path) == ["data/order.py imports training.config"]


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_package_resolves_inside_the_checkout(folder: str) -> None:
    spec = importlib.util.find_spec(folder)
    assert spec is not None
    assert spec.origin is not None
    assert Path(spec.origin).parent == ROOT / folder


def test_no_installed_distribution_claims_our_names() -> None:
    claimed = packages_distributions()
    assert {name: claimed[name] for name in OURS - {"moe_kernels"} if name in claimed} == {}


def test_files_are_of_readable_size() -> None:
    too_long = []
    for folder in (*MAY_IMPORT, "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            limit = MAX_KERNEL_LINES if "cute" in path.parts else MAX_LINES
            num_lines = len(path.read_text(encoding="utf-8").splitlines())
            if num_lines > limit:
                too_long.append(f"{path.relative_to(ROOT)}: {num_lines} lines, {limit} allowed")
    assert too_long == []
