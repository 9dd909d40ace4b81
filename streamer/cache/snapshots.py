"""Which slot holds the recurrent state after which prefix. Pure bookkeeping; the executor copies the bytes.

A recurrent state cannot be cut back to an earlier position, so a prefix can only be resumed where somebody
took a snapshot: at chunk boundaries that are page boundaries, under the name of the page that ends there. The
number of slots is fixed (a state can be 157 MB); the least recently used snapshot makes room.
"""

from collections import OrderedDict
from collections.abc import Sequence

from streamer.cache.pages import PageName


class SnapshotTable:
    """`slots`: state slots of the executor that no sequence gets. May be empty: nothing is ever found."""

    def __init__(self, slots: Sequence[int]) -> None:
        self._free = list(reversed(slots))
        self._slot_of: OrderedDict[PageName, int] = OrderedDict()  # least recently used first
        self.n_slots = len(slots)

    def find(self, names: Sequence[PageName]) -> tuple[int, int] | None:
        """The longest prefix with a snapshot: (pages of the prefix, slot of its state). Counts as a use.

        The copy out of the slot must be ordered before the next `claim`'s copy into it: the executor's order
        does it.
        """
        for n_pages in range(len(names), 0, -1):
            slot = self._slot_of.get(names[n_pages - 1])
            if slot is not None:
                self._slot_of.move_to_end(names[n_pages - 1])
                return n_pages, slot
        return None

    def claim(self, name: PageName) -> int | None:
        """A slot to copy the state after `name` into; None when it is there already or there are no slots."""
        if name in self._slot_of:
            self._slot_of.move_to_end(name)
            return None
        if self._free:
            slot = self._free.pop()
        elif self._slot_of:
            _, slot = self._slot_of.popitem(last=False)
        else:
            return None
        self._slot_of[name] = slot
        return slot

    def forget(self, names: Sequence[PageName]) -> None:
        """The states under these names are not to be trusted."""
        for name in names:
            slot = self._slot_of.pop(name, None)
            if slot is not None:
                self._free.append(slot)

    def check_integrity(self) -> None:
        slots = [*self._free, *self._slot_of.values()]
        assert len(slots) == len(set(slots)) == self.n_slots, "a snapshot slot is lost or held twice"

    def __len__(self) -> int:
        return len(self._slot_of)

    def __repr__(self) -> str:
        return f"SnapshotTable(slots={self.n_slots}, used={len(self)})"
