# SPDX-License-Identifier: Apache-2.0
"""What the layers of one pass over a batch share: the plan, the caches, rotations, and the current selection."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from cedar.cache.rows import RowPlan, WindowView
from cedar.cache.store import KVCache
from cedar.model.rope import RopeTable

CosSin = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Selection:
    """What an index source publishes to the layers that reuse it.

    index: int64 [T, width] selected compressed positions, ascending, then -1. slots: int64 [T, width] their pool rows; 0: none.
    blocks: the candidate blocks int64 [T, c] of a candidate source, ascending, then -1; None: all blocks.
    """

    index: Tensor
    slots: Tensor
    blocks: Tensor | None = None


@dataclass(frozen=True)
class WindowKeys:
    """Window records that queries of a layer look up through the plan's view. staged: those of the step's own rows [T, width]."""

    table: Tensor
    staged: Tensor


class Rotations:
    """cos and sin of a batch's positions, made when a layer first asks."""

    def __init__(self, plan: RowPlan, plain: RopeTable, compressed: RopeTable) -> None:
        self._plan = plan
        self._tables = {False: plain, True: compressed}
        self._rows: dict[bool, CosSin] = {}
        self._groups: dict[int, CosSin] = {}

    def rows(self, compressed: bool) -> CosSin:
        """Of the rows' positions, float32 [T, dr/2]. compressed: the layer has a ratio."""
        if compressed not in self._rows:
            self._rows[compressed] = self._tables[compressed](self._plan.positions)
        return self._rows[compressed]

    def groups(self, ratio: int, positions: Tensor) -> CosSin:
        """Of the first tokens of the groups that end in this step, float32 [g, dr/2]."""
        if ratio not in self._groups:
            self._groups[ratio] = self._tables[True](positions)
        return self._groups[ratio]

    def refresh(self) -> None:
        """The plan's positions changed: the tensors that were handed out follow them."""
        for compressed, rotation in self._rows.items():
            _replace(rotation, self._tables[compressed](self._plan.positions))
        for ratio, rotation in self._groups.items():
            write = self._plan.entries[ratio].write
            assert write is not None
            _replace(rotation, self._tables[True](write.positions))


def _replace(old: CosSin, new: CosSin) -> None:
    for before, after in zip(old, new, strict=True):
        before.copy_(after)


@dataclass
class PassState:
    """One pass: `Transformer.encode` or `Transformer.decode`. Index sources replace ``selection``; reuse layers read it.

    engram_rows: table rows int64 [T, columns] of each Engram layer.
    """

    plan: RowPlan
    cache: KVCache
    rotations: Rotations
    view: WindowView
    engram_rows: dict[int, Tensor] = field(default_factory=dict)
    selection: Selection | None = None
    candidates: Tensor | None = None
