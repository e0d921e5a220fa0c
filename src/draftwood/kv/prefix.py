"""Which pages hold which text, after their requests have ended as well. Numbers only: no tensors, no torch.

A tree whose edges are full pages of tokens: the path from the root to a node spells a text, and the node's page holds
the latents of its last `page_size` tokens. Nothing shorter than a page is ever in it. The cache is one owner of each of
its pages; a request that begins with the same text becomes another one, so pages are shared and never copied.

A request pins the path that its own text has in the tree, from its beginning to its end. What nobody pins is idle: it
counts as available, and the leaf that was left longest ago goes first when pages are wanted.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterator, Sequence

from draftwood.kv.pages import PagePool


class Node:
    """One full page of a text; its page of the pool is `page`."""

    __slots__ = ("children", "key", "left", "page", "parent", "pins")

    def __init__(self, parent: Node | None, key: bytes, page: int) -> None:
        self.parent = parent
        self.key = key
        self.page = page
        self.children: dict[bytes, Node] = {}
        self.pins = 0
        """Requests whose text goes through here."""
        self.left = 0
        """When a request that went through here was last left, in such events."""


class PrefixCache:
    """The texts whose pages are kept, on the pages of `pool`."""

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.root = Node(None, b"", -1)
        """The empty text. It is never pinned and never evicted."""
        self.count = 0
        """Pages in the cache."""
        self.idle_count = 0
        """Those of them that no request pins. They can all be had by `make_room`."""
        self._clock = 0
        self._leaves: list[tuple[int, int, Node]] = []
        """A heap of the idle leaves by when they were left; entries that are out of date are passed over."""
        self._pushed = 0

    def enter(self, tokens: Sequence[int], most: int) -> tuple[Node, list[int]]:
        """Pin the longest path that `tokens` begins with, at most `most` pages of it, and share its pages.

        Returns where it ends and the pages in order. Each `enter` is followed by one `leave` of where the request's
        path ends then; the pages are given back to the pool.
        """
        node, pages = self.root, []
        for i in range(most):
            child = node.children.get(self.key(tokens, i))
            if child is None:
                break
            self._pin(child)
            pages.append(child.page)
            node = child
        self.pool.share(pages)
        return node, pages

    def extend(self, node: Node, tokens: Sequence[int], index: int, page: int) -> Node:
        """Go on from `node`, which the caller pins, by page `index` of `tokens`, and pin what is there.

        If the text is not in the cache yet, `page` of the caller is what it keeps; if it is, by another request that
        computed the same, the caller's page stays the caller's own.
        """
        key = self.key(tokens, index)
        child = node.children.get(key)
        if child is None:
            child = node.children[key] = Node(node, key, page)
            self.pool.share([page])
            self.count += 1
            self.idle_count += 1
        self._pin(child)
        return child

    def leave(self, node: Node) -> None:
        """Unpin the path that ends at `node`."""
        self._clock += 1
        while node.parent is not None:
            node.pins -= 1
            node.left = self._clock
            if node.pins == 0:
                self.idle_count += 1
                self._offer(node)
            node = node.parent

    def make_room(self, pages: int) -> None:
        """Let go of idle pages, those left longest ago first, until `pages` are free or nothing is idle."""
        while self.pool.free_count < pages and self.idle_count:
            left, _, node = heapq.heappop(self._leaves)
            if node.parent is None or node.pins or node.children or node.left != left:
                continue  # used, extended or evicted since
            parent = node.parent
            del parent.children[node.key]
            node.parent = None
            self.count -= 1
            self.idle_count -= 1
            self.pool.release([node.page])
            self._offer(parent)

    def pages(self) -> list[int]:
        """Return every page of the cache. Raises AssertionError where its counts are not what the tree says."""
        nodes = list(self._nodes())
        idle = sum(node.pins == 0 for node in nodes)
        if (len(nodes), idle) != (self.count, self.idle_count):
            raise AssertionError(f"the prefix cache counts {self.count} pages, {self.idle_count} idle; it has {len(nodes)}, {idle}")
        if any(node.pins > node.parent.pins for node in nodes if node.parent not in (None, self.root)):
            raise AssertionError("a path of the prefix cache is pinned below a place where it is not")
        return [node.page for node in nodes]

    def key(self, tokens: Sequence[int], index: int) -> bytes:
        """Return what page `index` of a text is called among the children of the node of the page before it."""
        size = self.pool.page_size
        return array("i", tokens[index * size : (index + 1) * size]).tobytes()

    def _nodes(self) -> Iterator[Node]:
        stack = [self.root]
        while stack:
            children = stack.pop().children.values()
            yield from children
            stack.extend(children)

    def _pin(self, node: Node) -> None:
        self.idle_count -= node.pins == 0
        node.pins += 1

    def _offer(self, node: Node) -> None:
        """Put a node among those to evict, if it is an idle leaf."""
        if node.parent is None or node.pins or node.children:
            return
        if len(self._leaves) > 2 * self.count + 64:  # mostly out of date: a text that is used again and again
            self._leaves = [e for e in self._leaves if e[2].parent and not (e[2].pins or e[2].children) and e[0] == e[2].left]
            heapq.heapify(self._leaves)
        self._pushed += 1
        heapq.heappush(self._leaves, (node.left, self._pushed, node))
