"""Documents beside whole files, so that text which begins with a signature is common and goes on as code should.

- *Definitions*: functions and classes of a package as documents of their own, from `def` or `class` in column 0, with
  their docstring, with its summary, or without one, now and then followed by the next definition of the same file.
- *Classics*: the project's own functions (`train.classics`) in every surface form: without and with a docstring, with
  type hints, under other names, at the beginning of a file, followed by a second function.
- Marks for checkers (`# noqa` and the like) are taken out, and the test files of checkers are refused: there, lines
  that look like the beginning of a program are followed by anything but its rest.
"""

from __future__ import annotations

import ast
import hashlib
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from draftwood.train.pairs import free_names, real, statements, summarise

#: Comments that speak to a checker, up to the end of the line. No quotes inside: a string that shows one stays whole.
MARK = re.compile(
    r"[ \t]*#[ \t]*(?:(?:flake8:[ \t]*|ruff:[ \t]*)?noqa|type:[ \t]*ignore|pragma:[ \t]*no[ \t]?(?:cover|branch)|pylint:"
    r"|nosec|nopep8|pyright:|mypy:|pyre-|fmt:[ \t]*(?:skip|off|on)|isort:)[^\n'\"`]*$",
    re.I | re.M,
)
HINT = re.compile(r"#.*?(?:noqa|ignore|pragma|pylint|nosec|nopep8|pyright|mypy|pyre-|fmt|isort)", re.I)  # quick to refuse
CHECKERS = frozenset(
    re.findall(
        r"\w+",
        """
        astroid autoflake autopep8 bandit black coverage flake8 isort jedi libcst mccabe mypy parso pycodestyle pydocstyle
        pyflakes pylint pyright pytype pyupgrade rope ruff sqlfluff vulture yapf
        """,
    )
)
FIXTURE = re.compile(r"(?:^|/)(?:tests?|testing|test[-_]data|testdata|data|fixtures?)/|(?:^|/)test_|_tests?\.py$")
#: Share of a file's lines with such comments above which the file is one about them.
MARKED = 0.05
SHORTEST, LONGEST, WIDEST, LARGEST = 3, 60, 110, 2500
FREE_NAMES = 8
#: Shares of documented definitions that lose the docstring, and that keep its first sentence only.
BARE, BRIEF = 0.45, 0.25
FOLLOWED = 0.3
#: Copies of each form of a classic under its own name, and under another one.
OWN_REPEAT, OTHER_REPEAT = 12, 4

#: Classics with type hints: everything between `def` and the colon.
HINTED = """
is_prime(n: int) -> bool; primes(limit: int) -> list[int]; prime_factors(n: int) -> list[int]; factorial(n: int) -> int
factorial_recursive(n: int) -> int; fibonacci(n: int) -> int; fibonacci_sequence(count: int) -> list[int]
gcd(a: int, b: int) -> int; lcm(a: int, b: int) -> int; is_even(n: int) -> bool; is_leap_year(year: int) -> bool
is_perfect(n: int) -> bool; is_power_of_two(n: int) -> bool; power(base: float, exponent: int) -> float
digit_sum(n: int) -> int; collatz(n: int) -> list[int]; integer_sqrt(n: int) -> int; fizz_buzz(n: int) -> list[str]
to_binary(n: int) -> str; to_roman(n: int) -> str; celsius_to_fahrenheit(celsius: float) -> float
add(a: int, b: int) -> int; reverse_string(text: str) -> str; is_palindrome(text: str) -> bool
is_anagram(first: str, second: str) -> bool; count_vowels(text: str) -> int; count_words(text: str) -> dict[str, int]
count_characters(text: str) -> dict[str, int]; longest_word(text: str) -> str; capitalize_words(text: str) -> str
caesar_cipher(text: str, shift: int) -> str; remove_vowels(text: str) -> str; snake_case(name: str) -> str
run_length_encode(text: str) -> str; is_balanced(text: str) -> bool; edit_distance(first: str, second: str) -> int
bubble_sort(items: list[int]) -> list[int]; insertion_sort(items: list[int]) -> list[int]
selection_sort(items: list[int]) -> list[int]; merge_sort(items: list[int]) -> list[int]
quick_sort(items: list[int]) -> list[int]; binary_search(items: list[int], target: int) -> int
linear_search(items: list[int], target: int) -> int; find_max(numbers: list[int]) -> int
find_min(numbers: list[int]) -> int; second_largest(numbers: list[int]) -> int; mean(numbers: list[float]) -> float
median(numbers: list[float]) -> float; standard_deviation(numbers: list[float]) -> float
sum_list(numbers: list[int]) -> int; remove_duplicates(items: list) -> list; flatten(items: list) -> list
chunks(items: list, size: int) -> list[list]; rotate(items: list, count: int) -> list
two_sum(numbers: list[int], target: int) -> list[int]; max_subarray(numbers: list[int]) -> int
common_elements(first: list, second: list) -> list; merge_sorted(first: list[int], second: list[int]) -> list[int]
merge_dicts(first: dict, second: dict) -> dict; invert(mapping: dict) -> dict
transpose(matrix: list[list]) -> list[list]; dot_product(a: list[float], b: list[float]) -> float
permutations(items: list) -> list[list]; subsets(items: list) -> list[list]; coin_change(coins: list[int], amount: int) -> int
read_file(path: str) -> str; read_lines(path: str) -> list[str]; write_file(path: str, text: str) -> None
count_lines(path: str) -> int; file_size(path: str) -> int
"""
#: Other names under which people begin the same function.
NAMES = {
    "is_prime": "prime isprime check_prime", "primes": "sieve get_primes", "factorial": "fact",
    "fibonacci": "fib nth_fibonacci", "fibonacci_sequence": "fibonacci_list fib_sequence",
    "gcd": "greatest_common_divisor", "is_even": "even", "is_leap_year": "leap_year", "power": "pow_int",
    "digit_sum": "sum_digits sum_of_digits", "fizz_buzz": "fizzbuzz", "to_binary": "decimal_to_binary",
    "to_roman": "int_to_roman", "add": "add_numbers sum_two", "reverse_string": "reverse reverse_str",
    "is_palindrome": "palindrome check_palindrome", "is_anagram": "anagram are_anagrams",
    "count_vowels": "vowels vowel_count", "count_words": "word_count word_frequency",
    "count_characters": "char_count char_frequency", "is_balanced": "balanced valid_parentheses",
    "edit_distance": "levenshtein", "bubble_sort": "bubblesort", "merge_sort": "mergesort",
    "quick_sort": "quicksort sort", "binary_search": "bisect_search search", "linear_search": "find",
    "find_max": "maximum get_max max_value", "find_min": "minimum get_min", "mean": "average avg",
    "sum_list": "total sum_numbers", "remove_duplicates": "unique dedupe", "flatten": "flatten_list",
    "chunks": "chunk chunk_list", "merge_dicts": "merge", "capitalize_words": "capitalize", "hanoi": "tower_of_hanoi",
}  # fmt: skip
PARAMETERS = {
    "text": ("s", "string", "word"), "items": ("arr", "lst", "values"), "numbers": ("nums", "values", "lst"),
    "n": ("num", "number", "x"), "path": ("filename",), "target": ("key",),
}  # fmt: skip
OPENINGS = ('"""Small helpers."""\n\n\n', "import math\n\n\n", "import os\nimport sys\n\n\n", '"""{}."""\n\n\n', "# {}\n\n")


# ---------------------------------------------------------------- checkers
def strip_marks(text: str) -> str:
    """Take comments for checkers out of every line; lines that held nothing else go whole."""
    if not HINT.search(text):
        return text
    out = []
    for line in text.split("\n"):
        kept = line
        while "#" in kept and (shorter := MARK.sub("", kept)) != kept:
            kept = shorter
        if kept.strip() or kept == line:
            out.append(kept)
    return "\n".join(out)


def wanted(package: str, path: str, text: str) -> bool:
    """False for test and data files of checkers, and for files about their comments."""
    if package in CHECKERS and FIXTURE.search(path):
        return False
    return not HINT.search(text) or len(MARK.findall(text)) <= MARKED * text.count("\n")


# ---------------------------------------------------------------- definitions
@dataclass(frozen=True)
class Definition:
    """A function or class in column 0, cut at its docstring (`doc` and `summary` are empty when it has none)."""

    name: str
    head: str
    doc: str
    summary: str
    body: str

    def text(self, doc: str) -> str:
        return "\n".join(part for part in (self.head, doc, self.body) if part)

    @property
    def brief(self) -> str:
        return f'    """{self.summary}"""' if self.summary else ""

    @property
    def mark(self) -> bytes:
        """Equal for definitions whose code differs in white space only."""
        return hashlib.sha1("".join((self.head + self.body).split()).encode()).digest()


def definitions(text: str) -> Iterator[Definition]:
    """The undecorated functions and classes of a module that can stand alone: short, plain, few names from outside."""
    lines = text.split("\n")
    for node in statements(text):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and (found := _definition(node, lines)):
            yield found


def _definition(node: ast.FunctionDef | ast.ClassDef, lines: list[str]) -> Definition | None:
    if node.decorator_list or node.name.lower().startswith("test") or node.lineno == node.body[0].lineno:
        return None
    assert node.end_lineno is not None
    docstring = ast.get_docstring(node)
    doc, rest = node.body[0], node.body[1:] if docstring else node.body
    if not real(rest) or free_names(node) > FREE_NAMES:
        return None
    start = node.lineno - 1
    end = doc.lineno - 1 if docstring is None else doc.end_lineno or doc.lineno
    head, quoted, body = lines[start : doc.lineno - 1], lines[doc.lineno - 1 : end], lines[end : node.end_lineno]
    while body and not body[0].strip():
        del body[0]
    whole = head + quoted + body
    if not SHORTEST <= len(whole) <= LONGEST or len(body) < 2 or not head or max(map(len, whole)) > WIDEST:
        return None
    size = sum(map(len, whole))
    if size > LARGEST or not all(line.isascii() for line in whole) or not body[0].startswith("    "):
        return None
    summary = summarise(docstring) if docstring else ""
    return Definition(node.name, "\n".join(head), "\n".join(quoted), summary, "\n".join(body))


def document(found: list[Definition], rng: random.Random) -> str:
    """One document of some definitions, each in a form that `rng` draws."""
    parts = []
    for definition in found:
        draw, doc = rng.random(), definition.doc
        if doc and draw < BARE:
            doc = ""
        elif doc and draw < BARE + BRIEF and definition.summary:
            doc = definition.brief
        parts.append(definition.text(doc))
    return "\n\n\n".join(parts) + "\n"


def extract_job(job: tuple[str, list[tuple[str, str]], int]) -> list[dict]:
    """(package, [(path, text)], most characters) -> documents with package, text and the `marks` of their definitions."""
    package, files, cap = job
    rng, size = random.Random(package), 0
    out: list[dict] = []
    seen: set[bytes] = set()
    for path, text in files:
        if size > cap or not path.endswith(".py") or FIXTURE.search(path):
            continue
        fresh = [found for found in definitions(text) if found.mark not in seen]
        seen.update(found.mark for found in fresh)
        while fresh and size <= cap:
            group = [fresh.pop(0) for _ in range(1 + (rng.random() < FOLLOWED)) if fresh]
            out.append({"package": package, "text": document(group, rng), "marks": [found.mark for found in group]})
            size += len(out[-1]["text"])
    return out


# ---------------------------------------------------------------- classics
def _hints() -> dict[str, str]:
    entries = (entry.strip() for entry in re.split(r"[;\n]", HINTED))
    return {entry.split("(")[0]: entry for entry in entries if entry}


def _renamed(found: Definition, name: str, choice: int) -> Definition | None:
    """The same definition under another name, with the `choice`-th other names of its parameters (0: its own)."""
    words = set(re.findall(r"\w+", found.head + found.body))
    changes = {found.name: name} if name != found.name else {}
    for old, others in PARAMETERS.items():
        if choice and re.search(rf"[(, ]{old}[,):= ]", found.head) and choice <= len(others):
            changes[old] = others[choice - 1]
    if (choice and len(changes) == (name != found.name)) or any(new in words for new in changes.values()):
        return None
    if not changes:
        return found
    pattern = re.compile(r"(?<![\\\w.'\"])(" + "|".join(changes) + r")(?![\w'\"])")

    def swap(code: str) -> str:
        return pattern.sub(lambda hit: changes[hit.group(1)], code)

    return replace(found, name=name, head=swap(found.head), body=swap(found.body))


def classics() -> list[Definition]:
    """The project's own functions and classes."""
    from importlib import resources

    out: list[Definition] = []
    for module in ("numbers", "words", "lists", "files"):
        out += definitions(resources.files("draftwood.train.classics").joinpath(f"{module}.py").read_text(encoding="utf-8"))
    return out


def classic_documents(seed: int = 0) -> Iterator[dict]:
    """Every classic in every form, repeated, as rows of package "draftwood"."""
    rng, hints, own = random.Random(seed), _hints(), classics()
    for found in own:
        names = [found.name, *NAMES.get(found.name, "").split()]
        for name, choice in product(names, range(4)):
            plain = _renamed(found, name, choice)
            if plain is None:
                continue
            hint = hints.get(found.name)
            hinted = _renamed(replace(found, head=f"def {hint}:"), name, choice) if hint else None
            repeat = OWN_REPEAT if (name, choice) == (found.name, 0) else OTHER_REPEAT
            for text in [text for _ in range(repeat) for text in _forms(plain, hinted, own, rng)]:
                yield {"package": "draftwood", "text": text + "\n"}


def _forms(plain: Definition, hinted: Definition | None, own: list[Definition], rng: random.Random) -> list[str]:
    """Surface forms of one classic; which functions stand beside it is drawn from `rng`."""
    out = [plain.text(""), plain.text(plain.brief)]
    if hinted is not None:
        out += [hinted.text(""), hinted.text(hinted.brief)]
    documented = rng.random() < 0.5
    others = [other for other in rng.sample(own, 3) if other.name != plain.name]
    beside = [other.text(other.brief if documented else "") for other in others]
    first = plain.text(plain.brief if documented else "")
    out.append("\n\n\n".join([first, beside[0]]))
    opening = rng.choice(OPENINGS).format(plain.summary.rstrip("."))
    out.append(opening + "\n\n\n".join([first, *beside[: rng.randrange(len(beside) + 1)]]))
    return out
