"""Every command of the README does what it says, and its Python example runs."""

import json
import re
import shlex
from pathlib import Path

import pytest

from draftwood import cli

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def commands() -> list[list[str]]:
    """The `draftwood` commands of all sh blocks, as argument lists; what installs or tests the package is left out."""
    found = []
    for words in (shlex.split(block, comments=True) for block in joined()):
        found += [c for c in split(words) if c[:1] == ["draftwood"]]
    return found


def joined() -> list[str]:
    """Blocks with a newline outside quotes made a `;`, so that shlex sees where a command ends."""
    out = []
    for block in blocks("sh"):
        quote, text = "", ""
        for char in block:
            if char in "'\"" and quote in ("", char):
                quote = "" if quote else char
            text += " ; " if char == "\n" and not quote else char
        out.append(text)
    return out


def split(words: list[str]) -> list[list[str]]:
    runs: list[list[str]] = [[]]
    for word in words:
        if word in (";", "&&"):
            runs.append([])
        else:
            runs[-1].append(word)
    return runs


def test_the_first_two_commands_install_generate_and_test():
    first, second = blocks("sh")[:2]
    assert first.startswith("pip install . && draftwood generate")
    assert second.strip() == 'pip install ".[test]" && pytest'


@pytest.mark.parametrize("command", commands(), ids=lambda c: " ".join(c[1:3]))
def test_a_command_of_the_readme_runs(command, capfd):
    assert cli.main(command[1:]) == 0
    shown = capfd.readouterr()
    assert shown.out.strip()
    if "--json" in command:
        json.loads(shown.out.splitlines()[-1])


def test_the_python_example_runs(capfd):
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), {})
    assert capfd.readouterr().out.strip()
