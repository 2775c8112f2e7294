"""Physical KV pages: who holds which, by reference counts, and what is kept for prompts to come."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence

from jaxinfer.core.observer import PoolUsage
from jaxinfer.core.page_runs import PageRuns

PADDING_PAGE = 0
ROOM_FOR_CACHE = 4
"""A pool whose size nobody chose is at most this many times what the sequences that run at once can use: what is over
keeps prefixes for prompts to come."""


class BlockPool:
    """Hands out the pages 1 .. num_pages - 1; page 0 takes the writes of padded work and is never handed out.

    A page may be held several times (`retain`) and is free again when every holder has released it. A page that was
    named (`register`), or whose tokens were told (`offer`), is then kept as cache: it can be found and held again,
    until `allocate` finds no other page and evicts the one that was released longest ago.

    Args:
        num_pages: pages, the padding page included.
        page_size: positions in a page.
        on_evict: told of each named page, and its name, that is evicted; its content stays until a round writes to it.
    """

    def __init__(
        self, num_pages: int, page_size: int, on_evict: Callable[[int, bytes], None] = lambda page, name: None
    ) -> None:
        if num_pages < 2:
            raise ValueError(f"A pool needs at least 2 pages, one of them for padding, not {num_pages}.")
        if page_size < 1:
            raise ValueError(f"A page must hold at least 1 position, not {page_size}.")
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_evictions = 0
        self._on_evict = on_evict
        self.reset()

    @property
    def usable_pages(self) -> int:
        """Pages that can be held at all."""
        return self.num_pages - 1

    @property
    def free_pages(self) -> int:
        """Pages nobody holds, those kept as cache included."""
        return len(self._free) + len(self._cached)

    @property
    def usage(self) -> PoolUsage:
        """Pages held, kept only as cache, and free."""
        return PoolUsage(self.usable_pages - self.free_pages, len(self._cached), len(self._free))

    def pages_for(self, positions: int) -> int:
        """Number of pages that hold this many positions."""
        return -(-positions // self.page_size)

    def reference_count(self, page: int) -> int:
        """How many holders a page has."""
        return self._references[page]

    def name_of(self, page: int) -> bytes | None:
        """The name a page can be found by."""
        return self._names[page]

    def allocate(self, count: int) -> list[int]:
        """Take `count` free pages, each held once. RuntimeError, and nothing taken, if there are fewer."""
        if count > self.free_pages:
            raise RuntimeError(f"{count} pages were asked of the pool, but only {self.free_pages} are free.")
        pages = [self._free.popleft() if self._free else self._evict() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def retain(self, pages: Iterable[int]) -> None:
        """Hold pages that somebody holds already, or that are kept as cache, once more."""
        for page in pages:
            if self._references[page] == 0:
                if page not in self._cached:
                    raise RuntimeError(f"Page {page} is free and cannot be shared.")
                del self._cached[page]
            self._references[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Give up one hold on each page, the last first: of a cached chain the end is of least use without the rest."""
        for page in reversed(pages):
            if self._references[page] < 1:
                raise RuntimeError(f"Page {page} was released more often than it was held.")
            self._references[page] -= 1
            if self._references[page] == 0:
                if self._is_findable(page):
                    self._cached[page] = None
                else:
                    self._free.append(page)

    def register(self, page: int, name: bytes) -> None:
        """Let a held page, which must not change from now on, be found by its name.

        If another page has the name already, that one stays and this one remains private.
        """
        if self._references[page] < 1:
            raise RuntimeError(f"Page {page} is free and cannot be named.")
        if self._names[page] is None and name not in self._page_named:
            self._names[page] = name
            self._page_named[name] = page

    def page_named(self, name: bytes) -> int | None:
        """The page of this name; it is not held yet."""
        return self._page_named.get(name)

    def offer(self, page: int, parent: bytes, token_ids: Sequence[int]) -> None:
        """Let the first positions of a held or named page, which hold these tokens after the page named `parent` and
        must not change from now on, be found and copied. Nothing is offered that another page offers already."""
        if self._references[page] < 1 and self._names[page] is None:
            raise RuntimeError(f"Page {page} is free and has nothing to offer.")
        self._runs.add(page, parent, token_ids)

    def longest_run(self, parent: bytes, token_ids: Sequence[int]) -> tuple[int, int]:
        """(page, count): the page that holds most of these tokens after the page named `parent`; count is 0 if none
        does. It is not held yet, and only to be copied: others may write its later positions."""
        return self._runs.longest(parent, token_ids)

    def run_of(self, page: int) -> tuple[int, ...]:
        """The tokens that a page offers; none if it offers nothing."""
        return self._runs.of(page)

    def forget(self, pages: Iterable[int]) -> None:
        """Take what pages can be found by away: nobody new shall find them. Those that nobody holds are free then."""
        for page in pages:
            if self._references[page] < 1:
                if page not in self._cached:
                    raise RuntimeError(f"Page {page} is not held and has no name to lose.")
                del self._cached[page]
                self._free.append(page)
            self._hide(page)

    def reset(self) -> None:
        """Take every page back from its holders and forget all names: what the pages held is of no use any more."""
        self._references = [0] * self.num_pages
        self._free = deque(range(1, self.num_pages))
        self._cached: OrderedDict[int, None] = OrderedDict()  # findable and held by nobody, longest released first
        self._page_named: dict[bytes, int] = {}
        self._names: list[bytes | None] = [None] * self.num_pages
        self._runs = PageRuns()

    def check_integrity(self) -> None:
        """RuntimeError unless every page but the padding page is once free, cached or held, and every name is right."""
        unused = [*self._free, *self._cached]
        free = set(unused)
        if len(free) != len(unused):
            raise RuntimeError("A page is in the free list twice.")
        if PADDING_PAGE in free or self._references[PADDING_PAGE]:
            raise RuntimeError("The padding page was handed out.")
        for page in range(1, self.num_pages):
            if (page in free) == (self._references[page] > 0):
                raise RuntimeError(f"Page {page} has {self._references[page]} holders and free is {page in free}.")
            name = self._names[page]
            if name is not None and self._page_named.get(name) != page:
                raise RuntimeError(f"Page {page} cannot be found by its name.")
            if self._references[page] == 0 and self._is_findable(page) != (page in self._cached):
                raise RuntimeError(f"Page {page} is kept as cache without a name, or free with one.")
        if len(self._page_named) != sum(name is not None for name in self._names):
            raise RuntimeError("A name leads to a page that does not have it.")
        self._runs.check_integrity()

    def _evict(self) -> int:
        page, _ = self._cached.popitem(last=False)
        name = self._names[page]
        if name is not None:
            self._on_evict(page, name)
        self._hide(page)
        self.num_evictions += 1
        return page

    def _is_findable(self, page: int) -> bool:
        return self._names[page] is not None or page in self._runs

    def _hide(self, page: int) -> None:
        self._runs.discard(page)
        name = self._names[page]
        if name is not None:
            del self._page_named[name]
            self._names[page] = None
