"""Named pages that were moved to host memory when the pool needed their room: which slot there holds which."""

from __future__ import annotations

from collections import OrderedDict


class HostTier:
    """Slots of host memory, each for one page. The one used longest ago makes room for the next.

    A page that comes back keeps its slot, so that nothing needs to be copied when the pool evicts it again. A slot that
    a round reads from (`take`) is not given to another page before the next round (`begin_round`).
    """

    def __init__(self, num_slots: int) -> None:
        if num_slots < 0:
            raise ValueError(f"Host memory holds at least 0 pages, not {num_slots}.")
        self.num_slots = num_slots
        self.reset()

    @property
    def used_slots(self) -> int:
        """Slots that hold a page."""
        return len(self._slots)

    def find(self, name: bytes) -> int | None:
        """The slot that holds the page of this name."""
        return self._slots.get(name)

    def put(self, name: bytes) -> int | None:
        """The slot that the page of this name is to be copied to; None if it is held already or nothing makes room."""
        if name in self._slots:
            self._slots.move_to_end(name)
            return None
        slot = self._free.pop() if self._free else self._make_room()
        if slot is not None:
            self._slots[name] = slot
        return slot

    def take(self, name: bytes) -> int:
        """The slot to read the page of this name from in the round at hand."""
        slot = self._slots[name]
        self._slots.move_to_end(name)
        self._read_from.add(slot)
        return slot

    def begin_round(self) -> None:
        """What the rounds before read has been read."""
        self._read_from.clear()

    def forget(self, name: bytes) -> None:
        """Give up the page of this name, if it is held."""
        slot = self._slots.pop(name, None)
        if slot is not None:
            self._free.append(slot)

    def reset(self) -> None:
        """Give up all pages."""
        self._slots: OrderedDict[bytes, int] = OrderedDict()  # used longest ago first
        self._free = list(range(self.num_slots - 1, -1, -1))
        self._read_from: set[int] = set()

    def check_integrity(self) -> None:
        """RuntimeError unless every slot is once free or held by one name."""
        if sorted([*self._slots.values(), *self._free]) != list(range(self.num_slots)):
            raise RuntimeError("A slot of host memory is lost, or belongs to two pages.")

    def _make_room(self) -> int | None:
        name = next(iter(self._slots), None)
        if name is None or self._slots[name] in self._read_from:
            return None  # the others were used later still
        return self._slots.pop(name)
