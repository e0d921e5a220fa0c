"""Draws a verified draft tree as text.

The committed tokens stand in one column from the root down; what was drafted beside them is indented under the node it
hangs from. A chain is one line, a fork indents once more:

    step 7: 8 nodes, 3 accepted
      > 'def'
      | - ' main' '('
      + ' fib'
      + 'on'
      = 'acci'

`>` root, `+` accepted node, `-` node not taken, `=` the target's own last choice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

LONGEST_LABEL = 24


@dataclass(frozen=True)
class Drawing:
    """One step of one row: the tree it verified and what came of it.

    `tokens` and `parents` are per node, node 0 is the root (parent -1); `path` holds the accepted nodes, root first;
    `final` is the token that the target chose after the last of them.
    """

    tokens: Sequence[int]
    parents: Sequence[int]
    path: Sequence[int]
    final: int


def label(text: str) -> str:
    """Return `text` quoted on one line, its middle left out when long."""
    shown = repr(text)
    if len(shown) <= LONGEST_LABEL:
        return shown
    half = (LONGEST_LABEL - 3) // 2
    return f"{shown[:half]}...{shown[-half:]}"


def draw(tree: Drawing, text_of: Callable[[int], str], title: str, bold: Callable[[str], str] = str) -> str:
    """Return the drawing. `text_of` gives a token's text, `bold` marks up the committed lines."""
    children: list[list[int]] = [[] for _ in tree.tokens]
    for node, parent in enumerate(tree.parents):
        if parent >= 0:
            children[parent].append(node)
    name = [label(text_of(token)) for token in tree.tokens]
    taken = set(tree.path)
    lines = [f"{title}: {len(tree.tokens) - 1} nodes, {len(tree.path) - 1} accepted"]
    for node in tree.path:
        lines.append(bold(f"  {'>' if node == tree.path[0] else '+'} {name[node]}"))
        for child in children[node]:
            if child not in taken:
                lines += _branch(child, children, name, "  | ")
    lines.append(bold(f"  = {label(text_of(tree.final))}"))
    return "\n".join(lines)


def _branch(node: int, children: list[list[int]], name: list[str], indent: str) -> list[str]:
    """Lines of a subtree that was not taken."""
    chain = [name[node]]
    while len(children[node]) == 1:
        node = children[node][0]
        chain.append(name[node])
    lines = [f"{indent}- {' '.join(chain)}"]
    for child in children[node]:
        lines += _branch(child, children, name, indent + "  ")
    return lines
