"""Physical KV pages: who holds which, by reference counts."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

PADDING_PAGE = 0


class BlockPool:
    """Hands out the pages 1 .. num_pages - 1; page 0 takes the writes of padded work and is never handed out.

    A page may be held several times (`retain`) and is free again when every holder has released it.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 2:
            raise ValueError(f"A pool needs at least 2 pages, one of them for padding, not {num_pages}.")
        if page_size < 1:
            raise ValueError(f"A page must hold at least 1 position, not {page_size}.")
        self.num_pages = num_pages
        self.page_size = page_size
        self._references = [0] * num_pages
        self._free = deque(range(1, num_pages))

    @property
    def usable_pages(self) -> int:
        """Pages that can be held at all."""
        return self.num_pages - 1

    @property
    def free_pages(self) -> int:
        """Pages nobody holds."""
        return len(self._free)

    def pages_for(self, positions: int) -> int:
        """Number of pages that hold this many positions."""
        return -(-positions // self.page_size)

    def reference_count(self, page: int) -> int:
        """How many holders a page has."""
        return self._references[page]

    def allocate(self, count: int) -> list[int]:
        """Take `count` free pages, each held once. RuntimeError, and nothing taken, if there are fewer."""
        if count > len(self._free):
            raise RuntimeError(f"{count} pages were asked of the pool, but only {len(self._free)} are free.")
        pages = [self._free.popleft() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def retain(self, pages: Iterable[int]) -> None:
        """Hold pages that somebody holds already once more."""
        for page in pages:
            if self._references[page] < 1:
                raise RuntimeError(f"Page {page} is free and cannot be shared.")
            self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Give up one hold on each page."""
        for page in pages:
            if self._references[page] < 1:
                raise RuntimeError(f"Page {page} was released more often than it was held.")
            self._references[page] -= 1
            if self._references[page] == 0:
                self._free.append(page)

    def check_integrity(self) -> None:
        """RuntimeError unless every page but the padding page is either free, once, or held."""
        free = set(self._free)
        if len(free) != len(self._free):
            raise RuntimeError("A page is in the free list twice.")
        if PADDING_PAGE in free or self._references[PADDING_PAGE]:
            raise RuntimeError("The padding page was handed out.")
        for page in range(1, self.num_pages):
            if (page in free) == (self._references[page] > 0):
                raise RuntimeError(f"Page {page} has {self._references[page]} holders and free is {page in free}.")
