# SPDX-License-Identifier: Apache-2.0
"""`PagePool`: pages shared by reference count, found again by name, and forgotten in the order of their last use.

A page is in one of three states: *free* (holds nothing), *in use* (sequences refer to it), or *idle* (nobody refers to it, but it
has a name and may be found). Room for new pages comes from free ones first, then from the idle one whose last use is longest
ago. A sequence gives its pages back last page first, so of one prefix the end is forgotten before the beginning, without
which it could not be found. Two sequences that computed the same tokens side by side hold two pages of one name; the last one
in use becomes idle, the others free: otherwise the beginning would age from when the first of them ended.

Provenance: an *exact* page was computed by a run that saw every window in full; a *bounded* one, by a run that followed a
bounded replay. Both may exist under one name.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from cedar.cache.prefix import Digest, TokenChain


@dataclass(frozen=True)
class PageName:
    """What an entry of the index promises: these tokens, and how the page was computed. before: digest of the page before it."""

    digest: Digest
    exact: bool
    before: Digest = field(default=b"", compare=False)


class PagePool:
    """Pages 1..num_pages; page 0 is the null page and never given out.

    on_forget: called with the name of every page that can no longer be found.
    """

    def __init__(self, num_pages: int, on_forget: Callable[[PageName], None] = lambda name: None) -> None:
        self.num_pages = num_pages
        self._references = [0] * (num_pages + 1)
        self._free = list(range(num_pages, 0, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._pages: dict[PageName, list[int]] = {}
        """Of each name the pages in use, the one to be found first; or one idle page."""
        self._names: dict[int, PageName] = {}
        self._following: dict[Digest, set[PageName]] = {}
        """Of a digest, the known names of pages that continue it."""
        self._on_forget = on_forget

    @property
    def num_in_use(self) -> int:
        """Pages that a sequence refers to."""
        return self.num_pages - len(self._free) - len(self._idle)

    @property
    def num_idle(self) -> int:
        """Pages that nobody refers to and that can be found."""
        return len(self._idle)

    @property
    def num_available(self) -> int:
        """Pages that `take` can give."""
        return len(self._free) + len(self._idle)

    def has_room(self, count: int, beside: Sequence[int] = ()) -> bool:
        """Could `take` give ``count`` pages once the pages ``beside`` are shared?"""
        return count <= self.num_available - sum(not self._references[page] for page in beside)

    def references(self, page: int) -> int:
        """How many sequences refer to a page."""
        return self._references[page]

    def take(self, count: int) -> list[int] | None:
        """``count`` pages of unknown content with one reference each; None, and nothing changes, when there are too few."""
        if count > self.num_available:
            return None
        while len(self._free) < count:
            self._forget(self._names[next(iter(self._idle))])
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._references[page] = 1
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """One more reference to each of these pages, which `find` returned."""
        for page in pages:
            if page not in self._names:
                raise RuntimeError(f"page {page} is shared but nobody published it")
            if not self._references[page]:
                del self._idle[page]
            self._references[page] += 1

    def give_back(self, pages: Iterable[int]) -> None:
        """One reference less to each, in this order of use: the last one is forgotten last."""
        for page in pages:
            if self._references[page] < 1:
                raise RuntimeError(f"page {page} was given back more often than it was taken")
            self._references[page] -= 1
            if self._references[page]:
                continue
            name = self._names.get(page)
            if name is not None and self._pages[name] == [page]:
                self._idle[page] = None
            else:
                self._drop(page)

    def publish(self, page: int, name: PageName) -> None:
        """Let a page in use, whose entries are all written, be found. An idle page of this name is not needed any more."""
        if not self._references[page] or page in self._names:
            raise RuntimeError(f"page {page} is published but {'has a name' if page in self._names else 'nobody uses it'}")
        same = self._pages.setdefault(name, [])
        same.append(page)
        self._names[page] = name
        self._following.setdefault(name.before, set()).add(name)
        if same[0] in self._idle:
            del self._idle[same[0]]
            self._drop(same[0])

    def is_published(self, page: int) -> bool:
        """Does a page have a name? `clear` may have taken it."""
        return page in self._names

    def find(self, chain: TokenChain, num_pages: int, *, exact: bool) -> list[int]:
        """The longest run of at most ``num_pages`` first pages of a chain; of two with one name the exact one.

        exact: stop before the first bounded page.
        """
        found: list[int] = []
        for number in range(min(num_pages, chain.num_pages)):
            digest = chain.digest(number)
            same = self._pages.get(PageName(digest, True))
            if same is None and not exact:
                same = self._pages.get(PageName(digest, False))
            if same is None:
                break
            found.append(same[0])
        return found

    def is_known(self, name: PageName) -> bool:
        """Can a page of this name be found?"""
        return name in self._pages

    def forget(self, pages: Iterable[int]) -> None:
        """Forget the names of these pages and all that continue one: they were computed from what must not be read again."""
        lost = [self._names[page].digest for page in pages if page in self._names]
        seen: set[Digest] = set()
        while lost:
            digest = lost.pop()
            if digest in seen:
                continue
            seen.add(digest)
            lost.extend(name.digest for name in self._following.get(digest, ()))
            for name in (PageName(digest, True), PageName(digest, False)):
                if name in self._pages:
                    self._forget(self._names[self._pages[name][0]])

    def clear(self) -> int:
        """Forget every name; idle pages become free. Returns how many names there were."""
        names = list(self._pages)
        for name in names:
            self._forget(name)
        return len(names)

    def _forget(self, name: PageName) -> None:
        for page in self._pages.pop(name):
            del self._names[page]
            if page in self._idle:
                del self._idle[page]
                self._free.append(page)
        following = self._following[name.before]
        following.discard(name)
        if not following:
            del self._following[name.before]
        self._on_forget(name)

    def _drop(self, page: int) -> None:
        """Nobody uses this page, and its name, if it has one, is another's too."""
        name = self._names.pop(page, None)
        if name is not None:
            self._pages[name].remove(page)
        self._free.append(page)
