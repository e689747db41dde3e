"""Room for executions: of engines (slots) and of harness hosts (places). Pure.

The law: an execution holds room at one place at the most, no place holds more than its size, and only open places hold
any. Capacity is the size of all open places; what is free is capacity less what is held.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator

from gyre.errors import InvariantBroken


class Slots:
    """Places of one kind, by rank. Taking and releasing room cost O(log places), whatever the size of a place."""

    def __init__(self, preference: Callable[[int], tuple[int, int]]) -> None:
        """`preference` orders places of equal load; the lowest is taken first."""
        self._preference = preference
        self._size: dict[int, int] = {}
        self._held: dict[int, set[int]] = {}
        self._place: dict[int, int] = {}
        self._levels: list[list[tuple[tuple[int, int], int]]] = []  # per load: heap of places that may have that load
        self._listed: set[tuple[int, int]] = set()  # (load, rank) pairs in those heaps
        self._lowest = 0  # no place that has room has a lower load
        self._roomy: list[tuple[tuple[int, int], int]] = []  # heap of places that may have room, by preference alone
        self._in_roomy: set[int] = set()
        self.capacity = 0

    def __contains__(self, rank: int) -> bool:
        return rank in self._size

    def __iter__(self) -> Iterable[int]:
        return iter(self._size)

    def __len__(self) -> int:
        return len(self._size)

    @property
    def free(self) -> int:
        """Room left at all open places."""
        return self.capacity - len(self._place)

    def size(self, rank: int) -> int:
        """Room of an open place, held or not; 0 where it is not open."""
        return self._size.get(rank, 0)

    def held(self, rank: int) -> set[int]:
        """Executions that hold room at a place."""
        return self._held.get(rank, set())

    def place(self, n: int) -> int | None:
        """Where execution n holds room."""
        return self._place.get(n)

    def open(self, rank: int, size: int) -> None:
        """A place counts from now on, empty."""
        if rank in self._size:
            raise InvariantBroken(6, f"place {rank} is open already")
        self._size[rank] = size
        self._held[rank] = set()
        self.capacity += size
        while len(self._levels) < size:
            self._levels.append([])
        self._list(rank)

    def close(self, rank: int) -> list[int]:
        """A place no longer counts; returns the executions that held room there, lowest first."""
        self.capacity -= self._size.pop(rank)
        executions = sorted(self._held.pop(rank))
        for n in executions:
            del self._place[n]
        return executions

    def take(self, n: int) -> int | None:
        """Hold room for execution n at the least loaded open place; returns its rank, or None where all are full."""
        while self._lowest < len(self._levels):
            load, heap = self._lowest, self._levels[self._lowest]
            while heap:
                rank = heap[0][1]
                if rank in self._size and len(self._held[rank]) == load < self._size[rank]:
                    self.take_at(n, rank)
                    return rank
                heapq.heappop(heap)
                self._listed.discard((load, rank))
            self._lowest += 1
        return None

    def take_at(self, n: int, rank: int) -> None:
        """Hold room for execution n at a certain place.

        Raises:
            InvariantBroken: the place is full, or n holds room already (2: it would run twice).
        """
        if n in self._place:
            raise InvariantBroken(2, f"execution {n} holds room at {self._place[n]} already")
        if len(self._held[rank]) >= self._size[rank]:
            raise InvariantBroken(4, f"place {rank} is full, execution {n} does not fit")
        self._held[rank].add(n)
        self._place[n] = rank
        self._list(rank)

    def release(self, n: int) -> int | None:
        """Execution n needs no room any more; returns where it held some."""
        rank = self._place.pop(n, None)
        if rank is not None:
            self._held[rank].discard(n)
            self._list(rank)
        return rank

    def spread(self, executions: list[int], order: Iterable[int]) -> dict[int, int]:
        """Hold room for executions at places in this order, each filled before the next; returns where each one is.

        Executions that found no room are missing in the answer.
        """
        places: dict[int, int] = {}
        left = iter(executions)
        n = next(left, None)
        for rank in order:
            if n is None:
                break
            while n is not None and len(self._held[rank]) < self._size[rank]:
                self.take_at(n, rank)
                places[n] = rank
                n = next(left, None)
        return places

    def with_room(self) -> Iterator[int]:
        """Open places that have room, in the order of preference, for `spread`: each one until it has none left."""
        while self._roomy:
            rank = self._roomy[0][1]
            if rank in self._size and len(self._held[rank]) < self._size[rank]:
                yield rank
            else:
                heapq.heappop(self._roomy)
                self._in_roomy.discard(rank)

    def _list(self, rank: int) -> None:
        load = len(self._held[rank])
        if load >= self._size[rank]:
            return
        self._lowest = min(self._lowest, load)
        if (load, rank) not in self._listed:
            self._listed.add((load, rank))
            heapq.heappush(self._levels[load], (self._preference(rank), rank))
        if rank not in self._in_roomy:
            self._in_roomy.add(rank)
            heapq.heappush(self._roomy, (self._preference(rank), rank))

    def check(self) -> None:
        """Raise `InvariantBroken` where the law does not hold; O(executions)."""
        if self.capacity != sum(self._size.values()) or len(self._place) != sum(map(len, self._held.values())):
            raise InvariantBroken(4, "room is miscounted")
        for n, rank in self._place.items():
            if n not in self._held[rank]:
                raise InvariantBroken(4, f"execution {n} is not at place {rank}")
        for rank, executions in self._held.items():
            if len(executions) > self._size[rank]:
                raise InvariantBroken(4, f"place {rank} holds {len(executions)}, its size is {self._size[rank]}")
