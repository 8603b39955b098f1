"""The floors of the house: imports go down only. Also what a reader may count on, such as the sizes of files."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("model", "dataset", "eval", "trainer", "scripts")
WHAT_FLOOR, MEASURING_FLOOR, TRAINING_LIBRARY_FLOOR, SCRIPT_LIBRARY_FLOOR, ENTRY_FLOOR = range(5)
FLOORS = {
    "model": WHAT_FLOOR,
    "dataset": WHAT_FLOOR,
    "eval": MEASURING_FLOOR,
    "trainer": TRAINING_LIBRARY_FLOOR,
    "scripts": SCRIPT_LIBRARY_FLOOR,
}


def sources():
    return [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


def is_entry(path: Path) -> bool:
    relative = path.relative_to(ROOT).as_posix()
    in_scripts = relative.startswith("scripts/") and relative.count("/") == 1
    return in_scripts or relative.startswith(("trainer/train_", "eval/eval_")) or relative == "eval/report.py"


def floor(path: Path) -> int:
    folder = path.relative_to(ROOT).parts[0]
    if is_entry(path) and path.name != "__init__.py":
        return ENTRY_FLOOR
    return FLOORS[folder]


def imported_modules(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def own_file(module: str) -> Path | None:
    path = ROOT.joinpath(*module.split("."))
    if module.split(".")[0] not in FOLDERS:
        return None
    return (
        path.with_suffix(".py")
        if path.with_suffix(".py").is_file()
        else (path / "__init__.py" if path.is_dir() else None)
    )


@pytest.mark.parametrize("path", sources(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_imports_go_down_only(path):
    wrong = []
    for module in imported_modules(path):
        target = own_file(module)
        if target is None or target.name == "__init__.py" and target.parent.parent == ROOT:
            continue
        here, there = path.relative_to(ROOT).parts[0], target.relative_to(ROOT).parts[0]
        if floor(target) > floor(path) or {here, there} == {"model", "dataset"}:
            wrong.append(module)
        if floor(target) == ENTRY_FLOOR and target != path:
            wrong.append(f"{module} (an entry)")
    assert not wrong, f"{path.relative_to(ROOT)} imports from a floor above or beside: {wrong}"


def test_torch_distributed_is_imported_in_one_file_only():
    users = {
        path.relative_to(ROOT).as_posix()
        for path in sources()
        if any(name.startswith(("torch.distributed", "torch.nn.parallel")) for name in imported_modules(path))
    }
    assert users == {"trainer/distributed.py"}


def test_only_the_chat_renderer_knows_the_template():
    users = {path.name for path in sources() if "chat_template" in path.read_text(encoding="utf-8")}
    assert "engine.py" not in users and "lm_dataset.py" not in users


def test_no_file_of_an_entry_folder_hides_a_module_of_others():
    taken = set(sys.stdlib_module_names) | {
        "torch",
        "transformers",
        "tokenizers",
        "datasets",
        "swanlab",
        "jinja2",
        "numpy",
        "yaml",
        "rich",
        "peft",
        "trl",
    }
    for folder in ("trainer", "scripts", "eval"):
        for path in (ROOT / folder).glob("*.py"):
            assert path.stem not in taken, f"{folder}/{path.name} hides a module of the same name"


def test_stage_scripts_are_short_and_files_are_readable():
    for path in [*ROOT.glob("trainer/train_*.py"), ROOT / "scripts/mid_train.py"]:
        lines = len(path.read_text(encoding="utf-8").splitlines())
        assert 25 <= lines <= 60, f"{path.name}: {lines} lines"
    for path in sources():
        lines = len(path.read_text(encoding="utf-8").splitlines())
        assert lines <= 450, f"{path.relative_to(ROOT)}: {lines} lines"


def test_the_training_loop_fits_on_a_screen_or_two():
    tree = ast.parse((ROOT / "trainer/engine.py").read_text(encoding="utf-8"))
    loop = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "train_epoch")
    assert loop.end_lineno - loop.lineno < 100


def test_no_eval_exec_or_unsafe_load():
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                assert name not in ("eval", "exec", "pickle.load", "pickle.loads"), f"{path}:{node.lineno} calls {name}"
                if name == "torch.load":
                    assert "weights_only=True" in ast.unparse(node), f"{path}:{node.lineno}"
