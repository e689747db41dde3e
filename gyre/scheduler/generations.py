"""Generations of prefix groups: which cells, in which order, can reduce gradients together. Pure.

The law: a generation's members are fixed; the training prefix is a prefix of it. A member that died breaks every prefix
that contains it, for good, so nobody can join behind it until another generation is built, which happens only while no
update runs. Members are the core, then the cells now in training, then the others, each by index: so a generation
always continues the training prefix that exists (invariant 5).
"""

from __future__ import annotations


class Generation:
    """The present generation. Lives tell a cell from the same rank after a failure."""

    def __init__(self) -> None:
        self.number = 0
        self.ranks: list[int] = []
        self.dirty = True  # living cells may not be the members
        self._lives: dict[int, int] = {}
        self._index: dict[int, int] = {}
        self._built: set[int] = set()
        self._built_prefix = 0
        self._intact = 0
        self._ordered = True

    def wanted(self, lives: dict[int, int], training: list[int]) -> list[int]:
        """The living cells (rank -> life) in the order of a new generation."""
        first = set(training)
        return sorted(lives, key=lambda rank: (rank != 0, rank not in first, rank))

    def is_of(self, ranks: list[int], lives: dict[int, int]) -> bool:
        """Whether this generation consists of these cells in these lives, none of them broken."""
        return self._intact == len(ranks) and ranks == self.ranks and all(self._lives[r] == lives[r] for r in ranks)

    def renew(self, ranks: list[int], lives: dict[int, int]) -> int:
        """Begin another generation; returns its number."""
        self.number += 1
        self.ranks = list(ranks)
        self._lives = {rank: lives[rank] for rank in ranks}
        self._index = {rank: i for i, rank in enumerate(ranks)}
        self._built, self._built_prefix = set(), 0
        self._intact = len(ranks)
        self._ordered = ranks == sorted(ranks)
        self.dirty = False
        return self.number

    def built(self, rank: int, life: int) -> None:
        """A member has its groups."""
        if self._lives.get(rank) == life:
            self._built.add(rank)
        while self._built_prefix < len(self.ranks) and self.ranks[self._built_prefix] in self._built:
            self._built_prefix += 1

    def break_at(self, rank: int) -> None:
        """A member's groups are dead."""
        self.dirty = True
        self._intact = min(self._intact, self._index.get(rank, self._intact))

    def shrink(self) -> None:
        """The training prefix shrank: an order that continued a prefix with a gap need not last."""
        self.dirty |= not self._ordered

    @property
    def usable(self) -> int:
        """Length of the longest prefix whose groups are built and intact."""
        return min(self._built_prefix, self._intact)

    @property
    def intact(self) -> int:
        """Length of the longest prefix without a dead member."""
        return self._intact

    def position(self, rank: int) -> int:
        """A member's index in the prefix order."""
        return self._index[rank]

    def living(self, lives: dict[int, int]) -> list[int]:
        """Members that have not died since, in prefix order."""
        return [rank for rank in self.ranks if lives.get(rank) == self._lives[rank]]

    def unbuilt(self, lives: dict[int, int]) -> list[int]:
        """Living members that have not reported their groups yet."""
        return [rank for rank in self.living(lives) if rank not in self._built]
