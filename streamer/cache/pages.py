"""Which page holds what: reference counts, content hashes, eviction. Pure bookkeeping; the bytes are
storage.py's.

Only full pages are shared. A page's name is a hash chained over everything before it, so equal names mean
equal prefixes and a page can be used by any sequence that starts with the same ids. The last, partly filled
page of a sequence is its own, which is why nothing here ever copies a page.

A page is in exactly one of three states: free (no content), used (referenced by sequences), cached
(referenced by nobody, content kept until the room is needed; least recently released goes first).
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

PageName = bytes  # 16 bytes: blake2b over the parent's name and the page's ids
ROOT: PageName = b""


def page_names(ids: npt.NDArray[np.int32], page_size: int, parent: PageName = ROOT) -> list[PageName]:
    """Names of the full pages of `ids`, in order; `parent` names the page before `ids[0]`.

    blake2b and not a fast hash: two users' prompts must not be brought to collide on purpose.
    """
    data = np.ascontiguousarray(ids, dtype=np.int32).tobytes()
    step = 4 * page_size
    names = []
    for start in range(0, len(data) - step + 1, step):
        parent = blake2b(parent + data[start : start + step], digest_size=16).digest()
        names.append(parent)
    return names


@dataclass(frozen=True)
class PageStatistics:
    free: int
    used: int
    cached: int
    evictions: int  # cached pages whose content was given up, since the start


class PagePool:
    """`n_pages` pages of `page_size` tokens. Not thread-safe: the engine's thread owns it."""

    def __init__(self, n_pages: int, page_size: int) -> None:
        if n_pages < 1 or page_size < 1:
            raise ValueError(f"a pool of {n_pages} pages of {page_size} tokens holds nothing")
        self.n_pages, self.page_size = n_pages, page_size
        self._free = list(
            range(n_pages - 1, -1, -1)
        )  # a stack: low numbers first, recently freed again first
        self._references = [0] * n_pages
        self._names: list[PageName | None] = [None] * n_pages
        self._page_of: dict[PageName, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently released first
        self._evictions = 0

    @property
    def n_available(self) -> int:
        """Pages an allocation can have: free ones and cached ones that would be evicted."""
        return len(self._free) + len(self._cached)

    def match_prefix(self, names: Iterable[PageName]) -> list[int]:
        """Pages that hold the leading `names`. Takes no reference: follow with `allocate` before anything
        else.
        """
        pages = []
        for name in names:
            page = self._page_of.get(name)
            if page is None:
                break
            pages.append(page)
        return pages

    def holds(self, name: PageName) -> bool:
        return name in self._page_of

    def allocate(self, shared: Sequence[int], n_new: int) -> list[int] | None:
        """References on the `shared` pages plus `n_new` pages of one's own, or None with nothing changed."""
        revived = sum(1 for page in shared if not self._references[page])
        if n_new > self.n_available - revived:
            return None
        for page in shared:
            if not self._references[page]:
                del self._cached[page]
            self._references[page] += 1
        return [*shared, *(self._take() for _ in range(n_new))]

    def extend(self) -> int | None:
        """One more page of one's own, or None when every page is used."""
        return self._take() if self._free or self._cached else None

    def _take(self) -> int:
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._cached.popitem(last=False)
            self._forget(page)
            self._evictions += 1
        self._references[page] = 1
        return page

    def register(self, page: int, name: PageName) -> None:
        """`page` is full and holds what `name` says; from now on others may share it.

        When another page already has the name this one stays private: one page a name keeps matching simple.
        """
        assert self._references[page] > 0, f"page {page} is registered while nobody owns it"
        if name not in self._page_of:
            assert self._names[page] is None, f"page {page} is registered twice"
            self._page_of[name] = page
            self._names[page] = name

    def release(self, pages: Sequence[int], *, forget: bool = False) -> None:
        """Give up one reference on each page. `forget`: the content is not to be trusted, share it no more.

        Pages go back last first, so that among cached pages the tail of a prefix is evicted before its head.
        """
        for page in reversed(pages):
            assert self._references[page] > 0, f"page {page} is released more often than taken"
            self._references[page] -= 1
            if forget:
                self._forget(page)
            if not self._references[page]:
                if self._names[page] is None:
                    self._free.append(page)
                else:
                    self._cached[page] = None

    def _forget(self, page: int) -> None:
        name = self._names[page]
        if name is not None:
            del self._page_of[name]
            self._names[page] = None

    def clear_cache(self) -> int:
        """Give up the content of every cached page; returns how many."""
        pages = list(self._cached)
        for page in pages:
            self._forget(page)
        self._free.extend(reversed(pages))
        self._cached.clear()
        return len(pages)

    def statistics(self) -> PageStatistics:
        free, cached = len(self._free), len(self._cached)
        return PageStatistics(free, self.n_pages - free - cached, cached, self._evictions)

    def check_integrity(self, owned: Iterable[Sequence[int]] = ()) -> None:
        """Every page is in exactly one state and referenced as often as the page lists in `owned` say.

        Raises AssertionError; for tests and for moments when the engine is idle.
        """
        counts = Counter(page for pages in owned for page in pages)
        free = set(self._free)
        assert len(free) == len(self._free), "a page is free twice"
        for page in range(self.n_pages):
            used, cached = self._references[page] > 0, page in self._cached
            assert (page in free) + used + cached == 1, f"page {page} is in no single state"
            assert self._references[page] == counts[page], (
                f"page {page}: {self._references[page]} references, {counts[page]} owners"
            )
            assert not cached or self._names[page] is not None, f"page {page} is cached without a name"
        named = {name: page for page, name in enumerate(self._names) if name is not None}
        assert named == self._page_of, "names and pages disagree"

    def __repr__(self) -> str:
        s = self.statistics()
        return f"PagePool(page_size={self.page_size}, free={s.free}, used={s.used}, cached={s.cached})"
