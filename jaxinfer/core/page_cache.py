"""The pages of sequences: what the cache has of them, what they take and give back, what others may find of them."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from jaxinfer.core.host_tier import HostTier
from jaxinfer.core.pool import PADDING_PAGE, BlockPool
from jaxinfer.core.prefix_hashes import page_hash, page_hashes, root_hash
from jaxinfer.core.request import Request, Sequence
from jaxinfer.core.step import PageCopy, PageIn, PageOut


@dataclass(frozen=True, slots=True)
class Prefix:
    """What the cache has of the known tokens of a sequence.

    Attributes:
        pages: for each leading page, the page of the pool that holds it; PADDING_PAGE for one that is in host memory,
            or that lies behind the window.
        hosted: (column, name) of those in host memory.
        source: the page that holds the tokens after them, to be copied.
        copied: how many tokens; 0 for no copy.
        next_name: the name of the first full page that is not there; None if there is no such page.
    """

    pages: tuple[int, ...] = ()
    hosted: tuple[tuple[int, bytes], ...] = ()
    source: int = PADDING_PAGE
    copied: int = 0
    next_name: bytes | None = None


@dataclass(slots=True)
class PageMoves:
    """Pages that a round moves."""

    outs: list[PageOut] = field(default_factory=list)
    ins: list[PageIn] = field(default_factory=list)
    copies: list[PageCopy] = field(default_factory=list)


class PageCache:
    """Pool, host memory and names on behalf of sequences.

    Full pages get a name once they are computed and are shared by whoever begins with the same tokens. What a sequence
    has in common with a part of a page it gets by copying that page into one of its own; a page is offered for that
    when it is full, when a prompt is complete, and when its sequence leaves.

    Pages that lie behind the window of every layer are given back while their sequence runs: their place in its list
    takes the padding page. The device may still have them in its page table: nothing reads them.

    A round moves pages before it computes: first out, then copies, then in. So whatever a page is taken for in a round,
    what it held before has been read.

    Args:
        num_pages, page_size: of the pool.
        host_pages: pages in host memory.
        window: positions that a token sees, itself included; None for all.
        longest_chunk: most positions that a round computes for a sequence.
        model_version: names model, weights and adapter; None finds nothing and keeps nothing.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        host_pages: int = 0,
        window: int | None = None,
        longest_chunk: int = 1,
        model_version: str | None = "",
    ) -> None:
        self.pool = BlockPool(num_pages, page_size, self._move_out)
        self.host = HostTier(host_pages)
        self.moves = PageMoves()
        self.window = window
        self._longest_chunk = longest_chunk
        self._model_version = model_version
        self._least_copied = max(1, page_size // 4)  # fewer are cheaper to compute than to copy
        self._came_in: list[tuple[int, bytes, bytes, tuple[int, ...]]] = []

    # Names and what can be found by them

    def prompt_names(self, request: Request) -> list[bytes]:
        """The names of the full pages of a prompt, after the root of their chain; empty if nothing is kept."""
        if self._model_version is None:
            return []
        root = root_hash(self._model_version, request.cache_salt)
        return page_hashes(root, request.prompt_ids, self.pool.page_size)

    def find(self, sequence: Sequence) -> Prefix:
        """What is there of a sequence's known tokens but the last, which is always computed, for its logits."""
        if not sequence.page_hashes:
            return Prefix()
        size, last = self.pool.page_size, sequence.num_known - 1
        names = sequence.page_hashes[1 : last // size + 1]
        columns = self._columns_found(names)
        hidden = self._columns_behind(columns * size)
        pages = [PADDING_PAGE] * hidden
        hosted = []
        for column in range(hidden, columns):
            page = self.pool.page_named(names[column])
            pages.append(PADDING_PAGE if page is None else page)
            if page is None:
                hosted.append((column, names[column]))
        tokens = sequence.known_ids(columns * size, min((columns + 1) * size, last))
        source, copied = self.pool.longest_run(sequence.page_hashes[columns], tokens)
        if copied < self._least_copied:
            source, copied = PADDING_PAGE, 0
        next_name = names[columns] if columns < len(names) else None
        return Prefix(tuple(pages), tuple(hosted), source, copied, next_name)

    def take(self, sequence: Sequence, prefix: Prefix) -> None:
        """Let a sequence begin with what was found, which still must be there; there must be room."""
        self.pool.retain(page for page in prefix.pages if page)
        # Taking room may evict what nobody holds and so use slots of host memory: those needed are fixed first.
        slots = [self.host.take(name) for _, name in prefix.hosted]
        sequence.pages = list(prefix.pages)
        for (column, name), slot in zip(prefix.hosted, slots, strict=True):
            sequence.pages[column] = self._bring_in(sequence, column, name, slot)
        if prefix.copied:
            (target,) = self.pool.allocate(1)
            sequence.pages.append(target)
            self.moves.copies.append(PageCopy(prefix.source, target))
        sequence.num_named = len(prefix.pages)
        sequence.num_computed = len(prefix.pages) * self.pool.page_size
        sequence.num_cached = sequence.num_computed + prefix.copied
        sequence.num_dropped = self._columns_behind(sequence.num_computed)

    def computed(self, sequence: Sequence, end: int) -> None:
        """A sequence's positions before `end` are computed: name the pages that became full."""
        size, names = self.pool.page_size, sequence.page_hashes
        sequence.num_computed = end
        if not names:
            return
        for column in range(sequence.num_named, end // size):
            tokens = sequence.known_ids(column * size, (column + 1) * size)
            if column + 1 == len(names):
                names.append(page_hash(names[column], tokens))
            page = sequence.pages[column]
            if page != PADDING_PAGE:
                self.pool.register(page, names[column + 1])
                self.pool.offer(page, names[column], tokens)
        sequence.num_named = end // size

    def offer_tail(self, sequence: Sequence) -> None:
        """Let the computed positions in the page that a sequence is filling be copied by others."""
        size = self.pool.page_size
        column, count = divmod(sequence.num_computed, size)
        if sequence.page_hashes and count >= self._least_copied and sequence.pages[column] != PADDING_PAGE:
            tokens = sequence.known_ids(column * size, sequence.num_computed)
            self.pool.offer(sequence.pages[column], sequence.page_hashes[column], tokens)

    def forget(self, sequence: Sequence) -> None:
        """Nothing that a sequence computed or found shall be found again."""
        for name in sequence.page_hashes[1:]:
            self.host.forget(name)
        named = (self.pool.page_named(name) for name in sequence.page_hashes[1:])
        self.pool.forget({page for page in (*named, *sequence.pages) if page})
        sequence.num_computed = 0

    # Pages of a sequence

    def take_pages(self, sequence: Sequence, positions: int) -> int:
        """Take pages for this many positions, as far as there are free ones; returns how many positions they hold."""
        missing = self.missing_pages(sequence, positions)
        sequence.pages += self.pool.allocate(min(missing, self.pool.free_pages))
        return min(positions, len(sequence.pages) * self.pool.page_size)

    def missing_pages(self, sequence: Sequence, positions: int) -> int:
        """How many pages it would have to take to hold this many positions."""
        return max(0, self.pool.pages_for(positions) - len(sequence.pages))

    def drop_behind_window(self, sequence: Sequence) -> None:
        """Give back the pages that no position yet to be scheduled sees."""
        end = self._columns_behind(sequence.num_cached)
        behind = sequence.pages[sequence.num_dropped : end]
        if behind:
            sequence.pages[sequence.num_dropped : end] = [PADDING_PAGE] * len(behind)
            sequence.num_dropped = end
            self.pool.release(behind)

    def leave(self, sequence: Sequence) -> None:
        """Give back all pages of a sequence; what others may find of them stays for as long as there is room."""
        self.offer_tail(sequence)
        pages = sequence.pages[sequence.num_dropped :]
        clear_pages(sequence)
        self.pool.release(pages)

    def pages_held(self, sequence: Sequence) -> int:
        """Pages that a sequence holds."""
        return len(sequence.pages) - sequence.num_dropped

    def most_pages(self, positions: int) -> int:
        """Most pages that a sequence of this many positions holds at once."""
        needed = self.pool.pages_for(positions)
        if self.window is None:
            return needed
        # With fewer than it could use, it works in smaller chunks.
        return min(needed, self._pages_in_sight(self._longest_chunk), self.pool.usable_pages)

    def least_pages(self, positions: int) -> int:
        """Pages without which a sequence cannot come to this many positions, however small its chunks."""
        return min(self.pool.pages_for(positions), self._pages_in_sight(1))

    def pages_shared(self, prefix: Prefix) -> int:
        """Pages that a sequence need not take because others hold them, for as long as it runs."""
        if self.window is not None:
            return 0  # they lie behind its window some time, and it needs others
        return sum(self.pool.reference_count(page) > 0 for page in prefix.pages)

    # Rounds

    def begin_round(self) -> None:
        """Before anything is done for the next round."""
        self.moves = PageMoves()
        self.host.begin_round()
        for page, name, parent, tokens in self._came_in:  # by now they are sure to come before a copy
            if self.pool.name_of(page) == name:
                self.pool.offer(page, parent, tokens)
        self._came_in.clear()

    def distrust(self, moved_in: Iterable[int]) -> None:
        """Rounds failed: these pages may not have come in, and what should have gone out may not have arrived."""
        self._came_in.clear()
        self.host.reset()
        self.pool.forget(page for page in moved_in if self.pool.name_of(page) is not None)

    def reset(self) -> None:
        """Take back all pages and forget everything; sequences that had pages are to be cleared (`clear_pages`)."""
        self.moves = PageMoves()
        self._came_in.clear()
        self.host.reset()
        self.pool.reset()

    # Checks

    def check_integrity(self, running: SequenceOf[Sequence]) -> None:
        """RuntimeError unless pages and names agree with the sequences that have a slot."""
        self.pool.check_integrity()
        self.host.check_integrity()
        holds = [0] * self.pool.num_pages
        for sequence in running:
            if any(sequence.pages[: sequence.num_dropped]) or PADDING_PAGE in sequence.pages[sequence.num_dropped :]:
                raise RuntimeError("A sequence holds a page that it gave back, or the padding page.")
            for page in sequence.pages[sequence.num_dropped :]:
                holds[page] += 1
        for page, count in enumerate(holds):
            if self.pool.reference_count(page) != count:
                raise RuntimeError(f"Page {page} has {self.pool.reference_count(page)} holds, but {count} users.")
        for sequence in running:
            self._check_names(sequence)

    def _check_names(self, sequence: Sequence) -> None:
        size = self.pool.page_size
        if sequence.num_named * size > sequence.num_computed or sequence.num_computed > sequence.num_cached:
            raise RuntimeError("A page is offered to others before it is computed.")
        known = sequence.known_ids(0, sequence.num_named * size)
        names = sequence.page_hashes[: sequence.num_named + 1]
        if sequence.num_named and page_hashes(names[0], known, size) != names:
            raise RuntimeError("A page is named after other tokens than it holds.")
        for page, name in zip(sequence.pages, names[1:], strict=False):
            if self.pool.name_of(page) not in (None, name):
                raise RuntimeError(f"Page {page} has the name of another.")
        for column, page in enumerate(sequence.pages):
            if column >= sequence.num_named and self.pool.name_of(page) is not None:
                raise RuntimeError("A page that is still written can be found by others.")
            run = self.pool.run_of(page)
            end = min(column * size + len(run), sequence.num_computed)
            if run != sequence.known_ids(column * size, end):
                raise RuntimeError(f"Page {page} offers other tokens than it holds.")

    def _columns_found(self, names: SequenceOf[bytes]) -> int:
        """The most leading pages of which all that are still in sight are there."""
        best = in_a_row = 0
        for column, name in enumerate(names, 1):
            known = self.pool.page_named(name) is not None or self.host.find(name) is not None
            in_a_row = in_a_row + 1 if known else 0
            if known and in_a_row >= column - self._columns_behind(column * self.pool.page_size):
                best = column
            elif not known and self.window is None:
                break
        return best

    def _columns_behind(self, position: int) -> int:
        """Leading pages that a token at this position, and those after it, do not see."""
        if self.window is None:
            return 0
        return max(0, position - self.window + 1) // self.pool.page_size

    def _pages_in_sight(self, chunk: int) -> int:
        """Most pages that hold a chunk and what its first position sees, wherever it begins."""
        if self.window is None:
            return self.pool.num_pages
        return (chunk + self.window - 3) // self.pool.page_size + 2

    def _bring_in(self, sequence: Sequence, column: int, name: bytes, slot: int) -> int:
        (page,) = self.pool.allocate(1)
        self.pool.register(page, name)
        self.moves.ins.append(PageIn(slot, page))
        size = self.pool.page_size
        tokens = sequence.known_ids(column * size, (column + 1) * size)
        self._came_in.append((page, name, sequence.page_hashes[column], tokens))
        return page

    def _move_out(self, page: int, name: bytes) -> None:
        slot = self.host.put(name)
        if slot is not None:
            self.moves.outs.append(PageOut(page, slot))


def clear_pages(sequence: Sequence) -> None:
    """Let a sequence have no pages and nothing computed."""
    sequence.pages = []
    sequence.num_cached = sequence.num_computed = sequence.num_shown = sequence.num_named = sequence.num_dropped = 0
