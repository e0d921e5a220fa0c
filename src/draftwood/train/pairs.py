"""Request -> answer pairs from Python source: a function, method or small class from its documentation.

A pair teaches a short unit that ends. The answer is always one fenced block of code (```python ... ```) whose
docstring is the one-line summary, or, for `kind` "doc", the first paragraph of the documentation as plain text.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import random
import re
import textwrap
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

FENCE = "```python\n{}\n```"
SHORTEST, LONGEST = 3, 40
#: Names a unit may take from its module (helpers, imports, constants) and still read as self-contained.
FREE_NAMES = 5
BUILTINS = frozenset(dir(builtins))
ROLE = re.compile(r":[a-z:]+:`~?([^`<]*?)(?:\s*<[^`]*>)?`")
IMPERATIVE = frozenset(
    re.findall(
        r"\w+",
        """
        add append apply assert attach build calculate call cast check clear close collect combine compare compile
        compute configure construct convert copy count create decode decorate define delete detect determine display
        download draw emit encode ensure estimate evaluate execute expand extract fetch fill filter find fit flatten
        format generate get group handle identify initialize insert install invert iterate join launch list load log
        look make map mark match merge move multiply normalize open parse perform plot pop prepare print process
        produce pull push put raise read record register remove rename render replace reset resolve retrieve return
        reverse rotate run sample save scale search select send serialize set show shuffle sort split start stop store
        strip sum swap take test transform translate trim truncate try turn update upload validate verify wait walk
        wrap write yield
        """,
    )
)

FUNCTION_REQUESTS = (
    "Write a Python function `{sig}`. {Summary}",
    "Write a Python function called `{name}`. {Summary}",
    "Implement `{sig}` in Python: {summary}",
    "Implement `{name}`: {summary}",
    "Write `{sig}`. {Summary}",
    "Please write a function `{sig}`.\n\n{Summary}",
    "Python function `{name}`: {summary}",
)
ASKED_REQUESTS = (  # when the summary starts with a verb
    "Write a Python function to {summary}",
    "Write a Python function that {third}",
    "Write a function `{name}` that {third}",
    "Write a function to {summary}",
    "Can you write a Python function that {clause}?",
    "How do I {bare} in Python?",
    "I need a function `{sig}` to {summary}",
    "{Summary}",
)
COMPLETE_REQUESTS = (
    "Complete this function:\n```python\n{stub}\n```",
    "Finish this Python function:\n```python\n{stub}\n```",
    "```python\n{stub}\n```\nWrite the body.",
)
METHOD_REQUESTS = (
    "Write a method `{sig}` for the class `{owner}`. {Summary}",
    "Implement the method `{name}` of `{owner}`: {summary}",
    "Add a method `{sig}` to `{owner}`. {Summary}",
    "Complete this method of `{owner}`:\n```python\n{stub}\n```",
    "Write the Python method `{owner}.{name}`: {summary}",
)
CLASS_REQUESTS = (
    "Write a Python class `{name}`. {Summary}",
    "Implement the class `{name}`: {summary}",
    "Write a class `{name}` in Python.\n\n{Summary}",
    "Complete this class:\n```python\n{stub}\n```",
)
DOC_REQUESTS = (
    "What does this code do?\n```python\n{code}\n```",
    "Explain this in one sentence:\n```python\n{code}\n```",
    "What does `{name}` do?\n```python\n{code}\n```",
    "Write a docstring summary for this:\n```python\n{code}\n```",
)
CLASSIC_REQUESTS = (  # `{task}` is imperative, without a full stop
    "Write a Python function to {task}.",
    "Write a function to {task}.",
    "Write Python code to {task}.",
    "Can you write a Python function to {task}?",
    "How do I {task} in Python?",
    "{Task} in Python.",
    "{Task}.",
    "{Task}",
    "write a python function to {task}",
    "I need Python code to {task}.",
)
DOC_SHARE = 0.06
#: Most units of one package that share their name and summary (`__repr__`, overrides of one interface).
ALIKE = 3


@dataclass(frozen=True)
class Unit:
    """A documented piece of code. `code` is dedented and carries the one-line docstring; `bare` has none."""

    kind: str  # function, method or class
    name: str
    owner: str
    signature: str
    summary: str
    stub: str
    code: str
    bare: str


def summarise(docstring: str) -> str:
    """The first paragraph on one line, without markup; "" when it is no plain English sentence of fair length."""
    paragraph = re.split(r"\n\s*\n", textwrap.dedent(docstring).strip(), maxsplit=1)[0]
    text = ROLE.sub(lambda found: found.group(1).rsplit(".", 1)[-1], " ".join(paragraph.split()))
    text = text.replace("``", "`").replace("\\", "").strip()
    if len(text) > 160 and (first := re.match(r"(.{20,160}?[.!?])(?=\s+[A-Z])", text)):
        text = first.group(1)
    words = text.split()
    if not (len(words) >= 3 and len(text) <= 200 and text.isascii()) or not re.match(r"[A-Za-z`]", text):
        return ""
    if '"""' in text or "::" in text or re.match(r"(?i)(see|deprecated|todo|fixme|test|note|same as|alias)\b", text):
        return ""
    if re.search(r":param|Parameters|Args:|Returns:|-{4}|>>>|={3}|@param|https?:", text):
        return ""
    return text[0].upper() + text[1:].rstrip(":;, ")


def _asked(summary: str) -> dict[str, str] | None:
    """The summary as "return the ..." and "returns the ..." when its first word is a known verb, else None."""
    first, _, rest = summary.partition(" ")
    verb = first.lower()
    for ending in ("ies", "es", "s", ""):
        stem = verb[: len(verb) - len(ending)] + ("y" if ending == "ies" else "") if verb.endswith(ending) else ""
        if stem in IMPERATIVE:
            break
    else:
        return None
    ending = "es" if re.search(r"(s|sh|ch|x|z)$", stem) else "ies" if re.search(r"[^aeiou]y$", stem) else "s"
    third = (stem[:-1] if ending == "ies" else stem) + ending
    rest = rest.strip()
    return {
        "summary": f"{stem} {rest}",
        "third": f"{third} {rest}",
        "bare": f"{stem} {rest}".rstrip("."),
        "clause": f"{third} {rest}".rstrip("."),
    }


def free_names(node: ast.AST) -> int:
    """How many names `node` reads that it neither defines nor finds among the builtins."""
    read: set[str] = set()
    bound: set[str] = set()
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            (read if isinstance(part.ctx, ast.Load) else bound).add(part.id)
        elif isinstance(part, ast.arg):
            bound.add(part.arg)
        elif isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            bound.add(part.name)
        elif isinstance(part, ast.alias):
            bound.add((part.asname or part.name).split(".")[0])
        elif isinstance(part, ast.ExceptHandler) and part.name:
            bound.add(part.name)
    return len(read - bound - BUILTINS)


def real(body: list[ast.stmt]) -> bool:
    """Whether the statements after the docstring do something: not pass, `...`, or only raising."""
    if not body or any(isinstance(part, ast.Raise) and "NotImplemented" in ast.dump(part) for part in body):
        return False
    if len(body) > 1:
        return True
    only = body[0]
    if isinstance(only, (ast.Pass, ast.Raise, ast.Global)):
        return False
    if isinstance(only, (ast.Return, ast.Expr)):  # `return self._x` and bare constants teach nothing
        return any(isinstance(part, (ast.Call, ast.BinOp, ast.BoolOp, ast.Compare, ast.IfExp)) for part in ast.walk(only))
    return True


def dedent(lines: list[str], column: int) -> str | None:
    """Lines moved left by `column`; None when one of them (a string's, say) starts further left."""
    if any(line[:column].strip() for line in lines):
        return None
    return "\n".join(line[column:].rstrip() for line in lines).rstrip()


def unit_of(node: ast.stmt, owner: str, lines: list[str]) -> Unit | None:
    """The unit that a definition makes, or None when it is undocumented, too long, trivial or leans on its module."""
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return None
    docstring = ast.get_docstring(node, clean=True)
    if not docstring or node.lineno == node.body[0].lineno or node.name.startswith(("test", "Test")):
        return None
    summary, body = summarise(docstring), node.body[1:]
    doc = node.body[0]
    if not summary or not real(body) or lines[doc.lineno - 1][: doc.col_offset].strip():
        return None
    indent = " " * doc.col_offset
    head, tail = lines[node.lineno - 1 : doc.lineno - 1], lines[doc.end_lineno : node.end_lineno]
    while tail and not tail[0].strip():
        del tail[0]
    if len(tail) < SHORTEST - 2 or len(head) + 1 + len(tail) > LONGEST:
        return None
    parts = [head, [f'{indent}"""{summary}"""'], tail]
    if isinstance(node, ast.ClassDef) and tail and re.match(r"\s*(async )?(def|class|@)", tail[0]):
        parts.insert(2, [""])
    code = dedent([line for part in parts for line in part], node.col_offset)
    stub = dedent(parts[0] + parts[1], node.col_offset)
    bare = dedent(head + tail, node.col_offset)
    if not code or not stub or not bare or not code.isascii() or max(map(len, code.split("\n"))) > 120:
        return None
    if free_names(node) > FREE_NAMES or len(code) > 1800 or not _parses(code):
        return None
    return Unit(*_naming(node, owner), summary, stub, code, bare)


def _parses(code: str) -> bool:
    try:
        ast.parse(code)
    except (SyntaxError, ValueError):
        return False
    return True


def _naming(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, owner: str) -> tuple[str, str, str, str]:
    """(kind, name, owner, signature): the signature without annotations, short enough for a sentence."""
    if isinstance(node, ast.ClassDef):
        return "class", node.name, owner, node.name
    args = [arg.arg for arg in node.args.posonlyargs + node.args.args]
    if node.args.vararg:
        args.append("*" + node.args.vararg.arg)
    args += [arg.arg for arg in node.args.kwonlyargs]
    if node.args.kwarg:
        args.append("**" + node.args.kwarg.arg)
    signature = f"{node.name}({', '.join(args)})"
    return "method" if owner else "function", node.name, owner, signature if len(signature) <= 90 else node.name


def statements(text: str) -> list[ast.stmt]:
    """The top-level statements of a module; none where the text is no Python that can be parsed."""
    try:
        with warnings.catch_warnings():  # old sources hold invalid escapes
            warnings.simplefilter("ignore")
            return ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []


def units(text: str) -> Iterator[Unit]:
    """Every unit of a module: its functions, its classes when small, and their methods when not."""
    lines = text.split("\n")
    for node in statements(text):
        if unit := unit_of(node, "", lines):
            yield unit
        elif isinstance(node, ast.ClassDef):
            for inner in node.body:
                if unit := unit_of(inner, node.name, lines):
                    yield unit


def request_for(unit: Unit, rng: random.Random) -> tuple[str, str, str]:
    """(kind, request, answer) for a unit: which question is asked is drawn from `rng`."""
    words = {"name": unit.name, "owner": unit.owner, "sig": unit.signature, "stub": unit.stub, "code": unit.bare}
    words |= {"Summary": unit.summary, "summary": unit.summary[0].lower() + unit.summary[1:]}
    if rng.random() < DOC_SHARE and len(unit.bare) < 900:
        return "doc", rng.choice(DOC_REQUESTS).format(**words), unit.summary
    choices: tuple[str, ...] = {"method": METHOD_REQUESTS, "class": CLASS_REQUESTS}.get(unit.kind, FUNCTION_REQUESTS)
    if unit.kind == "function":
        draw, asked = rng.random(), _asked(unit.summary)
        if draw < 0.2:
            choices = COMPLETE_REQUESTS
        elif asked and draw < 0.65:
            choices, words = ASKED_REQUESTS, words | asked
    return unit.kind, rng.choice(choices).format(**words), FENCE.format(unit.code)


def mark(unit: Unit) -> bytes:
    """Equal for units whose code without documentation differs in white space only."""
    return hashlib.sha1("".join(unit.bare.split()).encode()).digest()


def extract_job(job: tuple[str, list[tuple[str, str]], int]) -> list[dict]:
    """(package, [(path, text)], most characters) -> pairs with package, kind, request, answer and `mark`."""
    package, files, cap = job
    seen, found, size = set(), [], 0
    alike: Counter[tuple[str, str]] = Counter()
    for path, text in files:
        if not path.endswith(".py") or '"""' not in text or size > cap:
            continue
        for unit in units(text):
            key = mark(unit)
            alike[unit.name, unit.summary] += 1
            if key in seen or alike[unit.name, unit.summary] > ALIKE:
                continue
            seen.add(key)
            kind, request, answer = request_for(unit, random.Random(key))
            size += len(request) + len(answer)
            found.append({"package": package, "kind": kind, "request": request, "answer": answer, "mark": key})
    return found


def classic_pairs() -> Iterator[dict]:
    """The project's own functions in every wording, and its small talk, as pairs of package "draftwood"."""
    from importlib import resources

    from draftwood.train.classics.chat import TALK

    for name in ("numbers", "words", "lists", "files"):
        text = resources.files("draftwood.train.classics").joinpath(f"{name}.py").read_text(encoding="utf-8")
        documented = [node for node in ast.parse(text).body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
        asides = [ast.get_docstring(node) for node in documented]
        for unit, aside in zip(units(text), asides, strict=True):
            answer = FENCE.format(unit.code)
            for request in _wordings(unit, aside or ""):
                yield {"package": "draftwood", "kind": unit.kind, "request": request, "answer": answer}
    for requests, answer in TALK:
        for request in requests:
            yield {"package": "draftwood", "kind": "talk", "request": request, "answer": answer}


def _wordings(unit: Unit, docstring: str) -> list[str]:
    """Every request for a classic unit, without repeats: by signature, by task, and by its docstring's other tasks."""
    words = {"name": unit.name, "sig": unit.signature, "stub": unit.stub, "Summary": unit.summary}
    words["summary"] = unit.summary[0].lower() + unit.summary[1:]
    if unit.kind == "class":
        return [form.format(**words) for form in CLASS_REQUESTS]
    asked = _asked(unit.summary) or {}
    made = [form.format(**words) for form in FUNCTION_REQUESTS + COMPLETE_REQUESTS]
    made += [form.format(**(words | asked)) for form in ASKED_REQUESTS if asked]
    for task in [unit.summary, *docstring.split("\n")[2:]]:
        task = task.strip().rstrip(".")
        lower = task[0].lower() + task[1:]
        made += [form.format(task=lower, Task=task) for form in CLASSIC_REQUESTS if task]
    return list(dict.fromkeys(made))
