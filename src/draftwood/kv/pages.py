"""Who holds which page of the latent cache. Numbers only: no tensors, no torch.

A page is `page_size` consecutive slots of the cache; a slot holds one token's latents of every layer. Every page is
free (count 0), owned (count 1) or shared (count > 1), and `recount` proves it against the owners' own lists.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence


class PagesExhausted(Exception):
    """Fewer pages are free than were asked for; nothing was taken."""


class PageMismatch(AssertionError):
    """The pool's counts differ from what the owners hold: a leak, or a page used after its release."""


class PagePool:
    """Reference counts of `num_pages` pages, handed out last-released first (their memory is warm)."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"a pool needs at least one page of one slot, not {num_pages} pages of {page_size}")
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages - 1, -1, -1))
        self._counts = [0] * num_pages

    @property
    def free_count(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def pages_for(self, tokens: int) -> int:
        """Pages that cover `tokens` consecutive positions from 0."""
        return -(-tokens // self.page_size)

    def count(self, page: int) -> int:
        """How many owners hold `page`: 0 free, 1 owned, more shared."""
        return self._counts[page]

    def allocate(self, n: int) -> list[int]:
        """Return `n` pages with one owner each. Raises PagesExhausted, taking none, when fewer are free."""
        if n < 0:
            raise ValueError(f"cannot allocate {n} pages")
        if n > len(self._free):
            raise PagesExhausted(f"{n} pages asked for, {len(self._free)} of {self.num_pages} free")
        taken = [self._free.pop() for _ in range(n)]
        for page in taken:
            self._counts[page] = 1
        return taken

    def share(self, pages: Sequence[int]) -> None:
        """Add one owner to each page. Raises PageMismatch, adding none, when one of them is free."""
        self._check_held(Counter(pages), least=1)
        for page in pages:
            self._counts[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Take one owner from each page; without owners it is free. Raises PageMismatch on too many, taking none."""
        self._check_held(Counter(pages))
        for page in reversed(pages):
            self._counts[page] -= 1
            if self._counts[page] == 0:
                self._free.append(page)

    def _check_held(self, wanted: Counter[int], least: int | None = None) -> None:
        for page, times in wanted.items():
            if not 0 <= page < self.num_pages or self._counts[page] < (times if least is None else least):
                held = self._counts[page] if 0 <= page < self.num_pages else "no such page"
                raise PageMismatch(f"page {page} is used {times} times by a caller but its count is {held}")

    def recount(self, owners: Iterable[Sequence[int]]) -> None:
        """Prove that the counts are exactly what `owners` (one list of pages each) hold and that the rest is free.

        Raises PageMismatch naming the first page that differs.
        """
        held: Counter[int] = Counter()
        for pages in owners:
            held.update(pages)
        for page, count in enumerate(self._counts):
            if held[page] != count:
                raise PageMismatch(f"page {page} has count {count} but {held[page]} owners hold it")
        free = set(self._free)
        if len(free) != len(self._free) or free != {p for p, count in enumerate(self._counts) if count == 0}:
            raise PageMismatch("the free list is not exactly the pages of count 0")
