"""What tokens pages hold, so that a prompt that agrees with a part of a page can begin with a copy of it."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence


class PageRuns:
    """Runs of tokens, each in one page, by the name of the page before it.

    The runs after one page are kept in order, so that finding the one that agrees longest with some tokens, or one that
    holds them all, looks at two of them however many there are.
    """

    def __init__(self) -> None:
        self._after: dict[bytes, list[tuple[tuple[int, ...], int]]] = {}
        self._of: dict[int, tuple[bytes, tuple[int, ...]]] = {}

    def __contains__(self, page: int) -> bool:
        return page in self._of

    def __len__(self) -> int:
        return len(self._of)

    def add(self, page: int, parent: bytes, token_ids: Sequence[int]) -> None:
        """The page holds these tokens, in its first positions, after the page (or root) named `parent`.

        Replaces what was said of the page before. Nothing is kept if another page holds them too, and perhaps more.
        """
        self.discard(page)
        run = tuple(token_ids)
        siblings = self._after.setdefault(parent, [])
        place = bisect_left(siblings, (run,))
        if place < len(siblings) and siblings[place][0][: len(run)] == run:
            return
        insort(siblings, (run, page))
        self._of[page] = parent, run

    def discard(self, page: int) -> None:
        """Forget what the page holds."""
        if page not in self._of:
            return
        parent, run = self._of.pop(page)
        siblings = self._after[parent]
        del siblings[bisect_left(siblings, (run, page))]
        if not siblings:
            del self._after[parent]

    def of(self, page: int) -> tuple[int, ...]:
        """The tokens that the page is said to hold."""
        return self._of[page][1] if page in self._of else ()

    def longest(self, parent: bytes, token_ids: Sequence[int]) -> tuple[int, int]:
        """(page, count): the page after `parent` that agrees with most of these tokens from the first on; count may be
        0, the page is then of no meaning."""
        run = tuple(token_ids)
        siblings = self._after.get(parent, ())
        place = bisect_left(siblings, (run,))
        nearest = siblings[max(0, place - 1) : place + 1]
        return max(((page, _equal(run, held)) for held, page in nearest), key=lambda found: found[1], default=(0, 0))

    def check_integrity(self) -> None:
        """RuntimeError unless both ways of looking agree."""
        listed = {page: (parent, run) for parent, siblings in self._after.items() for run, page in siblings}
        if listed != self._of or any(siblings != sorted(siblings) for siblings in self._after.values()):
            raise RuntimeError("The runs of tokens in pages are listed wrongly.")


def _equal(first: Sequence[int], second: Sequence[int]) -> int:
    """How many leading tokens agree."""
    count = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        count += 1
    return count
