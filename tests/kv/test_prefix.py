"""The prefix cache against a plain dictionary of texts: it finds what it holds, gives up the oldest, loses no page."""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from draftwood.kv.pages import PageMismatch, PagePool
from draftwood.kv.prefix import PrefixCache

SIZE = 2
texts = st.lists(st.integers(0, 1), min_size=0, max_size=14)


def used(cache, pool, tokens, pages=None):
    """Run a request with this text from beginning to end; return how many pages it found."""
    node, shared = cache.enter(tokens, len(tokens) // SIZE)
    own = shared + pool.allocate(len(tokens) // SIZE - len(shared))
    for i in range(len(shared), len(own)):
        node = cache.extend(node, tokens, i, own[i])
    cache.leave(node)
    pool.release(own)
    return len(shared)


class CacheMachine(RuleBasedStateMachine):
    """Requests of small alphabets come, grow and go; `model` says which page holds which text."""

    def __init__(self):
        super().__init__()
        self.pool = PagePool(12, SIZE)
        self.cache = PrefixCache(self.pool)
        self.model: dict[tuple, int] = {}
        self.rows: list[dict] = []

    @rule(tokens=texts)
    def begin(self, tokens):
        node, pages = self.cache.enter(tokens, len(tokens) // SIZE)
        expected = []
        while (text := tuple(tokens[: SIZE * (len(expected) + 1)])) in self.model and len(text) == SIZE * (len(expected) + 1):
            expected.append(self.model[text])
        assert pages == expected
        self.rows.append({"tokens": list(tokens[: len(pages) * SIZE]), "pages": pages, "node": node})

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), page=st.lists(st.integers(0, 1), min_size=SIZE, max_size=SIZE))
    def grow(self, data, page):
        row = data.draw(st.sampled_from(self.rows))
        before = self.cache.idle_count
        self.cache.make_room(1)
        gone = before - self.cache.idle_count
        self._forget(gone)
        if not self.pool.free_count:
            assert not self.cache.idle_count
            return
        assert gone <= 1
        (own,) = self.pool.allocate(1)
        row["tokens"] += page
        row["node"] = self.cache.extend(row["node"], row["tokens"], len(row["pages"]), own)
        row["pages"].append(own)
        self.model.setdefault(tuple(row["tokens"]), own)

    def _forget(self, gone):
        kept = set(self.cache.pages())
        lost = [text for text, page in self.model.items() if page not in kept]
        assert len(lost) == gone
        for text in lost:
            assert not any(tuple(row["tokens"][: len(text)]) == text for row in self.rows), "a page in use was let go"
            del self.model[text]
        assert all(text[:-SIZE] in self.model for text in self.model if len(text) > SIZE), "an inner page went before its leaves"

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def end(self, data):
        row = self.rows.pop(data.draw(st.integers(0, len(self.rows) - 1)))
        self.cache.leave(row["node"])
        self.pool.release(row["pages"])

    @invariant()
    def adds_up(self):
        cached = self.cache.pages()
        self.pool.recount([*(row["pages"] for row in self.rows), cached])
        assert sorted(cached) == sorted(self.model.values())
        pinned = {tuple(row["tokens"][:n]) for row in self.rows for n in range(SIZE, len(row["tokens"]) + 1, SIZE)}
        assert self.cache.idle_count == len(set(self.model) - pinned)

    def teardown(self):
        while self.rows:
            row = self.rows.pop()
            self.cache.leave(row["node"])
            self.pool.release(row["pages"])
        self.cache.make_room(self.pool.num_pages)
        assert self.pool.free_count == self.pool.num_pages and self.cache.count == 0


TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def test_the_text_left_longest_ago_goes_first_leaves_before_what_they_hang_on():
    pool = PagePool(8, SIZE)
    cache = PrefixCache(pool)
    old, new = [1, 1, 2, 2, 3, 3], [1, 1, 4, 4]
    used(cache, pool, old)
    used(cache, pool, new)
    used(cache, pool, old)
    lengths = []
    for room in range(pool.free_count + 1, 9):
        cache.make_room(room)
        found = []
        for text in (old, new):
            node, pages = cache.enter(text, len(text) // SIZE)
            cache.leave(node)
            pool.release(pages)
            found.append(len(pages))
        lengths.append(found)
        used(cache, pool, old[: SIZE * found[0]])  # touched again: `new` stays the older one
    assert lengths == [[3, 1], [2, 1], [1, 1], [0, 0]]


def test_a_text_that_others_go_on_from_is_pinned_for_each_of_them():
    pool = PagePool(6, SIZE)
    cache = PrefixCache(pool)
    used(cache, pool, [1, 1, 2, 2])
    first, pages = cache.enter([1, 1, 2, 2], 2)
    second, same = cache.enter([1, 1, 9, 9], 2)
    assert same == pages[:1] and cache.idle_count == 0
    cache.leave(first)
    pool.release(pages)
    assert cache.idle_count == 1
    cache.make_room(6)
    assert cache.pages() == same
    cache.leave(second)
    pool.release(same)
    cache.make_room(6)
    assert pool.free_count == 6


def test_no_more_pages_are_shared_than_asked_for():
    pool = PagePool(4, SIZE)
    cache = PrefixCache(pool)
    used(cache, pool, [1, 1, 2, 2])
    node, pages = cache.enter([1, 1, 2, 2], 1)
    assert len(pages) == 1 and node.page == pages[0]


def test_the_second_of_two_that_compute_the_same_keeps_its_own_page():
    pool = PagePool(4, SIZE)
    cache = PrefixCache(pool)
    pages = pool.allocate(2)
    nodes = [cache.extend(cache.root, [1, 1], 0, page) for page in pages]
    assert nodes[0] is nodes[1] and cache.pages() == pages[:1]
    assert [pool.count(page) for page in pages] == [2, 1]


def test_a_text_used_again_and_again_leaves_no_trace_in_the_order_of_eviction():
    pool = PagePool(20, SIZE)
    cache = PrefixCache(pool)
    dice = random.Random(1)
    for _ in range(2000):
        used(cache, pool, [dice.randrange(3)] * 4)
    assert len(cache._leaves) <= 2 * cache.count + 65
    cache.make_room(20)
    assert pool.free_count == 20


def test_a_leak_is_found():
    pool = PagePool(4, SIZE)
    cache = PrefixCache(pool)
    used(cache, pool, [1, 1, 2, 2])
    cache.idle_count += 1
    with pytest.raises(AssertionError, match="prefix cache counts"):
        cache.pages()
    cache.idle_count -= 1
    pool.release([cache.pages()[0]])
    with pytest.raises(PageMismatch):
        pool.recount([cache.pages()])
