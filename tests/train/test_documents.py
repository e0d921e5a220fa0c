"""Documents of definitions and of the project's own functions; comments for checkers; what the held-out side keeps."""

from __future__ import annotations

import ast
import random
from collections import Counter

import pytest

from draftwood.train import documents
from draftwood.train.corpus import _definitions

MODULE = '''"""A module."""

import os


def average(values, start=0):
    """Return the mean of some values.

    More about it.
    """

    total = start
    for value in values:
        total += value
    return total / len(values)


def test_average():
    value = average([1, 2])
    assert value == 1.5
    assert value


@decorated
def other(values):
    total = sum(values)
    return total


def plain(first, second):
    joined = first + second
    joined.sort()
    return joined


def leaning(x):
    a1(b1, c1, d1)
    e1(f1, g1, h1)
    return i1(x)


class Box:
    """Hold a thing."""

    def __init__(self, thing):
        self.thing = thing
        self.seen = 0
'''


@pytest.mark.parametrize(
    ("line", "kept"),
    [
        ("import os  # noqa", "import os"),
        ("def f():  # NOQA: F811, E501", "def f():"),
        ("x = 1  # type: ignore[attr-defined]  # noqa: E501", "x = 1"),
        ("if a:  # pragma: no cover - rarely", "if a:"),
        ("import a  # isort:skip", "import a"),
        ("import a  # type: ignore  # old versions", "import a"),
        ("import a  # a reason  # noqa", "import a  # a reason"),
        ("x = 1  # pylint: disable=invalid-name", "x = 1"),
        ("x = 1  # a reason", "x = 1  # a reason"),
        ('x = "a  # noqa"', 'x = "a  # noqa"'),
    ],
)
def test_comments_for_checkers_go_and_nothing_else(line: str, kept: str) -> None:
    assert documents.strip_marks(f"a\n{line}\nb") == f"a\n{kept}\nb"


def test_a_line_of_nothing_but_such_a_comment_goes_whole_and_empty_lines_stay() -> None:
    assert documents.strip_marks("a\n    # pylint: disable=x\n\n# flake8: noqa\nb\n") == "a\n\nb\n"


def test_test_files_of_checkers_are_refused_and_files_full_of_their_comments() -> None:
    assert not documents.wanted("pyflakes", "pyflakes/test/test_imports.py", "x = 1\n")
    assert not documents.wanted("black", "tests/data/cases/a.py", "x = 1\n")
    assert documents.wanted("pyflakes", "pyflakes/checker.py", "x = 1\n")
    assert documents.wanted("numpy", "numpy/tests/test_a.py", "x = 1\n")
    assert not documents.wanted("numpy", "a.py", "import os  # noqa\n" * 10)
    assert documents.wanted("numpy", "a.py", "import os  # noqa\n" + "x = 1\n" * 30)


def test_definitions_stand_alone() -> None:
    found = {one.name: one for one in documents.definitions(MODULE)}
    assert set(found) == {"average", "plain", "Box"}  # no tests, nothing decorated, nothing that leans on its module
    average = found["average"]
    assert average.text("").startswith("def average(values, start=0):\n    total = start\n")
    assert average.text(average.brief).split("\n")[1] == '    """Return the mean of some values."""'
    assert "More about it." in average.text(average.doc)
    assert found["plain"].doc == found["plain"].summary == ""
    for one in found.values():
        for doc in ("", one.doc, one.brief):
            ast.parse(one.text(doc))


def test_documents_hold_every_definition_once_in_all_forms() -> None:
    files = [
        (f"p/{i}.py", MODULE.replace("values", f"values{i}").replace("first", f"first{i}").replace("seen", f"seen{i}"))
        for i in range(60)
    ]
    made = documents.extract_job(("p", files, 10**9))
    marks = [mark for row in made for mark in row["marks"]]
    assert len(marks) == len(set(marks)) == 180
    texts = [row["text"] for row in made]
    assert all(text.startswith(("def ", "class ")) and text.endswith("\n") for text in texts)
    about = [text for text in texts if "def average" in text]
    assert 10 < sum("mean" not in text for text in about) < 45 and any("More about it." in text for text in about)
    assert sum(len(row["marks"]) == 2 for row in made) > 10
    assert sum(len(text) for text in (row["text"] for row in documents.extract_job(("p", files, 2000)))) < 3000


class Pool:
    """Runs jobs here."""

    imap = staticmethod(map)


def test_what_a_held_out_package_holds_is_never_a_training_document() -> None:
    plain = MODULE[MODULE.index("def plain") : MODULE.index("def leaning")]
    work = [
        ({"name": "flask", "split": "held", "files": 1}, [("a.py", plain)]),
        ({"name": "other", "split": "train", "files": 1}, [("b.py", MODULE)]),
    ]
    rows = _definitions(Pool, work, 10**6)
    assert rows and all(row["package"] == "other" and "def plain" not in row["text"] for row in rows)
    assert [entry["definitions"] for entry, _ in work] == [0, len(rows)]


def test_classics_come_in_every_form_and_run() -> None:
    rows = list(documents.classic_documents())
    texts = Counter(row["text"] for row in rows)
    assert len(texts) > 3000 and len(rows) > 2 * len(texts)
    for text in random.Random(0).sample(sorted(texts), 800):
        ast.parse(text)
    names = documents._hints()
    own = {found.name: found for found in documents.classics()}
    assert set(names) <= set(own) and set(documents.NAMES) <= set(own)
    for hint in names.values():
        ast.parse(f"def {hint}: pass")
    for begins, call, value in (
        ("def fibonacci(n):\n    a, b", "fibonacci(10)", 55),
        ("def fib(n):\n    a, b", "fib(10)", 55),
        ("def is_prime(n):\n    if", "is_prime(9)", False),
        ("def is_prime(n: int) -> bool:\n", "is_prime(7)", True),
        ("def reverse(s):\n", "reverse('ab')", "ba"),
        ("def factorial(num):\n", "factorial(5)", 120),
        ("def flatten_list(lst):\n", "flatten_list([1, [2, [3]]])", [1, 2, 3]),
    ):
        matching = [text for text in texts if text.startswith(begins)]
        assert matching, begins
        for text in matching[:5]:
            scope: dict = {}
            exec(text, scope)
            assert eval(call, scope) == value, text


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("digit_sum", "{}(-123)"),
        ("to_roman", "{}(14)"),
        ("caesar_cipher", "{}('xyz', 3)"),
        ("two_sum", "{}([2, 7], 9)"),
        ("merge_sort", "{}([3, 1, 2])"),
        ("is_balanced", "{}('(]')"),
        ("count_words", "{}('a b a')"),
    ],
)
def test_a_classic_under_other_names_computes_the_same(name: str, call: str) -> None:
    own = {found.name: found for found in documents.classics()}
    results = set()
    for other in (name, "renamed"):
        for choice in range(4):
            found = documents._renamed(own[name], other, choice)
            if found is not None:
                scope: dict = {}
                exec(found.text(""), scope)
                results.add(repr(eval(call.format(other), scope)))
    assert len(results) == 1
