"""The house rules that a machine can check."""

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "draftwood"
MAX_LINES = 600
ROOMS = ("bench", "commands", "engine", "kernels", "kv", "model", "nano", "parallel", "server", "spec", "text", "train")
SILENT_ROOMS = ("engine", "kernels", "kv", "model", "parallel", "spec", "text")


def tracked(*suffixes: str) -> list[Path]:
    """Files of the repository with these suffixes; outside a git checkout, all such files of its folders."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode == 0 and listed.stdout:
        files = [ROOT / name for name in listed.stdout.split("\0") if name]
    else:
        files = [p for folder in ("src", "tests", "docs") for p in (ROOT / folder).rglob("*")] + list(ROOT.glob("*.*"))
    return sorted(p for p in files if p.suffix in suffixes and p.is_file())


def prints(path: Path) -> list[int]:
    """Lines that call print; none for a tool, a module that can be run."""
    tree = ast.parse(path.read_text())
    if any(isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'" for node in tree.body):
        return []
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return [call.lineno for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print"]


def test_no_source_file_is_longer_than_600_lines():
    long = {str(p.relative_to(ROOT)): n for p in tracked(".py", ".cu", ".cuh") if (n := p.read_text().count("\n")) > MAX_LINES}
    assert not long


def test_every_room_exists_and_is_a_package():
    assert [room for room in ROOMS if not (PACKAGE / room / "__init__.py").is_file()] == []


def test_the_import_contract_holds():
    program = shutil.which("lint-imports", path=str(Path(sys.executable).parent)) or shutil.which("lint-imports")
    assert program, "import-linter comes with the extra `test`"
    done = subprocess.run([program, "--no-logo", "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_only_env_reads_environment_variables():
    readers = [
        str(p.relative_to(ROOT))
        for p in tracked(".py")
        if p.is_relative_to(PACKAGE) and p != PACKAGE / "env.py" and not p.name.startswith("test_")
        if re.search(r"\bos\.(environ|getenv)\b|\bgetenv\(", p.read_text())
    ]
    assert readers == []


def test_library_rooms_print_nothing():
    printing = [
        f"{p.relative_to(ROOT)}:{line}"
        for p in tracked(".py")
        if any(p.is_relative_to(PACKAGE / room) for room in SILENT_ROOMS)
        for line in prints(p)
    ]
    assert printing == []


@pytest.mark.parametrize("folder", ["work", "root", "tmp", "home"])
def test_no_file_names_a_path_of_one_machine(folder):
    pattern = re.compile(rf"(?<![\w.}}$-])/{folder}/\w")
    found = [
        f"{p.relative_to(ROOT)}:{number}"
        for p in tracked(".py", ".cu", ".cuh", ".md", ".toml")
        for number, line in enumerate(p.read_text().splitlines(), 1)
        if pattern.search(line)
    ]
    assert found == []


def test_no_unfinished_code():
    words = ("TO" + "DO", "FIX" + "ME", "NotImplemented" + "Error")
    found = [
        f"{p.relative_to(ROOT)}:{number}"
        for p in tracked(".py", ".cu", ".cuh")
        if p.is_relative_to(PACKAGE)
        for number, line in enumerate(p.read_text().splitlines(), 1)
        if any(word in line for word in words)
    ]
    assert found == []
