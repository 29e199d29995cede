# SPDX-License-Identifier: Apache-2.0
"""`SlotPool`: private memory of sequences (window rings, open rows), and snapshots of it in the slots that no sequence needs.

A snapshot is the state after the last token of a page, under that page's name. A sequence that needs a slot takes a free one,
else that of the snapshot whose last use is longest ago.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from cedar.cache.prefix import Digest


@dataclass(frozen=True)
class Snapshot:
    """all_layers: the rings of every layer are those of a full run; else only those up to the cut layer's are."""

    slot: int
    all_layers: bool


class SlotPool:
    """Slots 1..num_slots; slot 0 is the null slot and never given out."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots, 0, -1))
        self._taken: set[int] = set()
        self._snapshots: OrderedDict[Digest, Snapshot] = OrderedDict()

    @property
    def num_in_use(self) -> int:
        """Slots that were taken and hold no snapshot."""
        return len(self._taken)

    @property
    def num_snapshots(self) -> int:
        """Slots that hold a snapshot."""
        return len(self._snapshots)

    def take(self) -> int | None:
        """A slot of unknown content; None when sequences hold them all."""
        if not self._free:
            if not self._snapshots:
                return None
            self._free.append(self._snapshots.popitem(last=False)[1].slot)
        slot = self._free.pop()
        self._taken.add(slot)
        return slot

    def give_back(self, slot: int) -> None:
        """A slot that was taken is not needed any more."""
        self._release(slot)
        self._free.append(slot)

    def keep(self, digest: Digest, snapshot: Snapshot, *, likely: bool = True) -> None:
        """A slot that was taken holds this snapshot now. It replaces one of the same name unless it knows fewer layers.

        likely: a prompt that continues this one would use it. Others are the first to give way until they are used, so a
        long prompt or answer, which passes many positions, takes no more than the unused room.
        """
        known = self._snapshots.get(digest)
        if known is not None and known.all_layers >= snapshot.all_layers:
            self.give_back(snapshot.slot)
            return
        self._release(snapshot.slot)
        self.forget(digest)
        self._snapshots[digest] = snapshot
        if not likely:
            self._snapshots.move_to_end(digest, last=False)

    def find(self, digest: Digest, *, all_layers: bool) -> Snapshot | None:
        """The snapshot of a name, which counts as a use of it."""
        known = self._snapshots.get(digest)
        if known is None or known.all_layers < all_layers:
            return None
        self._snapshots.move_to_end(digest)
        return known

    def has(self, digest: Digest, *, all_layers: bool) -> bool:
        """Would `find` return something?"""
        known = self._snapshots.get(digest)
        return known is not None and known.all_layers >= all_layers

    def forget(self, digest: Digest) -> None:
        """Drop the snapshot of a name, if there is one."""
        known = self._snapshots.pop(digest, None)
        if known is not None:
            self._free.append(known.slot)

    def _release(self, slot: int) -> None:
        if slot not in self._taken:
            raise RuntimeError(f"slot {slot} is not taken")
        self._taken.remove(slot)
