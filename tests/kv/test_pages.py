"""Every page is free, owned or shared, whatever is allocated, shared and released in whatever order."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from draftwood.kv.pages import PageMismatch, PagePool, PagesExhausted


class PoolMachine(RuleBasedStateMachine):
    """Owners come and go; the model is their plain lists."""

    def __init__(self):
        super().__init__()
        self.pool = PagePool(17, 4)
        self.owners = []

    @rule(n=st.integers(0, 20))
    def allocate(self, n):
        if n > self.pool.free_count:
            with pytest.raises(PagesExhausted):
                self.pool.allocate(n)
            return
        held = {p for pages in self.owners for p in pages}
        pages = self.pool.allocate(n)
        assert len(set(pages)) == n and not held & set(pages)
        self.owners.append(pages)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def share_a_prefix(self, data):
        pages = data.draw(st.sampled_from(self.owners))
        pages = pages[: data.draw(st.integers(0, len(pages)))]
        self.pool.share(pages)
        self.owners.append(list(pages))

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def release(self, data):
        self.pool.release(self.owners.pop(data.draw(st.integers(0, len(self.owners) - 1))))

    @precondition(lambda self: self.pool.free_count)
    @rule(data=st.data())
    def misuse_changes_nothing(self, data):
        free = data.draw(st.sampled_from([p for p in range(17) if self.pool.count(p) == 0]))
        for call in (self.pool.share, self.pool.release):
            with pytest.raises(PageMismatch):
                call([free])

    @invariant()
    def recount_agrees(self):
        self.pool.recount(self.owners)
        assert self.pool.free_count + len({p for pages in self.owners for p in pages}) == 17


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_recount_names_a_leak_and_a_use_after_release():
    pool = PagePool(4, 64)
    pages = pool.allocate(2)
    with pytest.raises(PageMismatch, match="count 1 but 0 owners"):
        pool.recount([])
    pool.release(pages)
    with pytest.raises(PageMismatch, match="count 0 but 1 owners"):
        pool.recount([pages])
    pool.recount([])


def test_releasing_the_same_page_twice_in_one_call_is_refused():
    pool = PagePool(4, 64)
    (page,) = pool.allocate(1)
    with pytest.raises(PageMismatch):
        pool.release([page, page])
    pool.recount([[page]])


def test_pages_for_covers_exactly():
    pool = PagePool(4, 64)
    assert [pool.pages_for(n) for n in (0, 1, 64, 65, 128, 129)] == [0, 1, 1, 2, 2, 3]
