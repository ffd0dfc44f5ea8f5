"""The pool of pages: who holds which page, and what the pages nobody holds still contain.

Every page is in exactly one of three places: *free* (contents worthless), *cached* (held by nobody, contents
published under a name, to be evicted when pages run short) or *in use* (held by at least one sequence or
transfer). Each method counts first and changes afterwards, so one that raises has changed nothing.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple


class OutOfPages(RuntimeError):
    """More pages were asked for than can be had; the call that raised this has changed nothing.

    Attributes
    ----------
    needed : int
        Pages that the call needs.
    free : int
        Pages that it could have had: free ones, and cached ones that could be evicted.
    """

    def __init__(self, where: str, needed: int, free: int) -> None:
        super().__init__(where, needed, free)  # so that it can be pickled
        self.where, self.needed, self.free = where, needed, free

    def __str__(self) -> str:
        return f"{self.where} needs {self.needed} more pages; {self.free} are free or can be evicted"


class PageEvent(NamedTuple):
    """Something that happened to a page of a `PagedKVCache`; its `take_events` returns them.

    Attributes
    ----------
    kind : str
        "allocated": held by somebody from now on. "freed": held by nobody any more; published contents stay.
        "published": other sequences can find its contents. "evicted": they no longer can. "copied":
        overwritten with the contents of `source`.
    page : int
        The page, from 0; the row of `k_pages` and `v_pages` in every layer.
    digest : bytes or None
        The name of its contents, a sha256 of 32 bytes: when published and evicted, and when allocated with contents
        that were cached.
    source : int or None
        The page that was copied from.
    """

    kind: Literal["allocated", "freed", "published", "evicted", "copied"]
    page: int
    digest: bytes | None = None
    source: int | None = None


class PagePool:
    """Pages 0 to total - 1 with reference counts, names and an order of eviction.

    Parameters
    ----------
    total : int
        Number of pages.
    emit : callable, optional
        Called with each `PageEvent`.
    """

    def __init__(self, total: int, emit: Callable[[PageEvent], object] = lambda event: None) -> None:
        self.total = total
        self.refs = [0] * total
        self.free = deque(range(total))
        self.cached: OrderedDict[int, None] = OrderedDict()  # the least recently held first
        self.page_of: dict[bytes, int] = {}  # name -> page
        self.digest_of: dict[int, bytes] = {}  # page -> name, the inverse
        self.evictions = 0
        self._emit = emit

    def available(self) -> int:
        """Pages that an allocation could get."""
        return len(self.free) + len(self.cached)

    def acquire(self, where: str, hits: Sequence[int], fresh: int) -> list[int]:
        """Hold the published pages `hits` once more, and `fresh` new ones.

        Parameters
        ----------
        where : str
            The start of the message of `OutOfPages`.
        hits : sequence of int
            Published pages, each once. Those that are cached can't be evicted to make room for the new ones.
        fresh : int
            How many new pages.

        Returns
        -------
        list of int
            The new pages.

        Raises
        ------
        OutOfPages
            If there are too few.
        """
        budget = self.available() - sum(self.refs[page] == 0 for page in hits)
        if fresh > budget:
            raise OutOfPages(where, fresh, budget)
        for page in hits:  # before anything is evicted
            if self.refs[page] == 0:
                del self.cached[page]
                self._emit(PageEvent("allocated", page, self.digest_of[page]))
            self.refs[page] += 1
        return [self._take() for _ in range(fresh)]

    def share(self, pages: Iterable[int]) -> None:
        """Hold pages once more that somebody holds already."""
        pages = list(pages)
        for page in pages:
            self._held(page, 1)
        for page in pages:
            self.refs[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Hold pages once less; those that nobody holds any more become cached or free, in the order given.

        Parameters
        ----------
        pages : iterable of int
            The first is evicted first, so the end of a sequence belongs before its beginning.

        Raises
        ------
        ValueError
            If a page would be released more often than it is held.
        """
        pages = list(pages)
        for page, times in Counter(pages).items():
            self._held(page, times)
        for page in pages:
            self.refs[page] -= 1
            if self.refs[page] == 0:
                self._emit(PageEvent("freed", page))
                if page in self.digest_of:
                    self.cached[page] = None
                else:
                    self.free.append(page)

    def publish(self, page: int, digest: bytes) -> bool:
        """Let others find a page that is in use under a name; of two pages with one name the first is kept.

        Returns
        -------
        bool
            Whether it is the page that is found under this name.
        """
        self._held(page, 1)
        if self.digest_of.get(page, digest) != digest:
            raise ValueError(f"page {page} must be published under one name; it has another")
        if digest not in self.page_of:
            self.page_of[digest], self.digest_of[page] = page, digest
            self._emit(PageEvent("published", page, digest))
        return self.page_of[digest] == page

    def unpublish(self, page: int) -> None:
        """Forget the name of a page, if it has one, since its contents are about to change."""
        digest = self.digest_of.pop(page, None)
        if digest is not None:
            if self.page_of.get(digest) == page:
                del self.page_of[digest]
            self.evictions += 1
            self._emit(PageEvent("evicted", page, digest))

    def _take(self) -> int:
        if self.free:
            page = self.free.popleft()
        else:
            page, _ = self.cached.popitem(last=False)
            self.unpublish(page)
        self.refs[page] = 1
        self._emit(PageEvent("allocated", page))
        return page

    def _held(self, page: int, times: int) -> None:
        if not 0 <= page < self.total:
            raise ValueError(f"page must be 0 to {self.total - 1}; got {page}")
        if self.refs[page] < times:
            raise ValueError(
                f"page {page} must be held {times} times to be shared or released; held {self.refs[page]}"
            )
