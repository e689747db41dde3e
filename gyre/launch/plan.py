"""From a configuration to ranks and resources. Pure.

Ranks are numbered cells first, then standalone engines, then harness hosts. On Slurm the engines' ranks (cells and
standalone) are het group 0 and the hosts are het group 1; without het jobs, all of them share the cells' nodes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import ceil
from typing import Literal

from gyre.config import Config, PlacementConfig
from gyre.errors import UserError

Kind = Literal["cell", "standalone", "host"]


@dataclass(frozen=True)
class Layout:
    """Which rank is what."""

    cells: int
    standalone: int
    hosts: int

    @classmethod
    def of(cls, config: Config) -> Layout:
        """The layout that a configuration asks for."""
        return cls(config.cells.count, config.cells.standalone, config.hosts.count)

    @property
    def engines(self) -> int:
        """Ranks with an engine: cells and standalone engines."""
        return self.cells + self.standalone

    @property
    def ranks(self) -> int:
        """All ranks."""
        return self.engines + self.hosts

    def kind(self, rank: int) -> Kind:
        """What a rank is.

        Raises:
            ValueError: there is no such rank.
        """
        if not 0 <= rank < self.ranks:
            raise ValueError(f"there is no rank {rank} among {self.ranks}")
        if rank < self.cells:
            return "cell"
        return "standalone" if rank < self.engines else "host"

    def __str__(self) -> str:
        """For messages: "3 cells + 1 host"."""
        parts = [count(self.cells, "cell")]
        if self.standalone:
            parts.append(count(self.standalone, "standalone engine"))
        return " + ".join([*parts, count(self.hosts, "host")])


@dataclass(frozen=True)
class Component:
    """What Slurm is asked for in one het group, or in the whole of a homogeneous job."""

    nodes: int
    tasks: int
    tasks_per_node: int  # at the most
    partition: str | None = None
    gres: str | None = None
    cpus_per_task: int | None = None
    mem: str | None = None
    constraint: str | None = None


@dataclass(frozen=True)
class Plan:
    """Ranks and the components that they run in, in rank order."""

    layout: Layout
    cells_per_node: int
    components: tuple[Component, ...]

    @property
    def het(self) -> bool:
        """Whether this is a het job."""
        return len(self.components) > 1


def count(number: int, word: str) -> str:
    """A number with its noun: "1 cell", "2 cells"."""
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def gpus_of(gres: str | None) -> int:
    """GPUs of one node in a generic-resources string such as "gpu:a100:8" or "gpu:2,nvme:1"; 0 without any."""
    total = 0
    for part in (gres or "").split(","):
        part = re.sub(r"\(.*\)$", "", part.strip()).removeprefix("gres/").replace("=", ":")
        name, *rest = part.split(":")
        if name == "gpu":
            total += int(rest[-1]) if rest and rest[-1].isdigit() else 1
    return total


def _cell_gres(config: Config) -> tuple[str | None, int]:
    """Generic resources of a cell node, and how many cells go on it."""
    gpus, gres = config.cells.gpus, config.slurm.cells.gres
    if not gpus:
        return gres, 1
    gres = gres or f"gpu:{gpus}"
    per_node = gpus_of(gres) // gpus
    if per_node < 1:
        raise UserError(
            f"slurm.cells.gres is {gres!r}, but a cell takes {count(gpus, 'GPU')} of one node; "
            f"ask for more GPUs, or lower cells.gpus"
        )
    return gres, per_node


def _placed(nodes: int, tasks: int, per_node: int, placement: PlacementConfig, gres: str | None) -> Component:
    return Component(
        nodes,
        tasks,
        per_node,
        partition=placement.partition,
        gres=gres,
        cpus_per_task=placement.cpus_per_task,
        mem=placement.mem,
        constraint=placement.constraint,
    )


def plan(config: Config, het: bool | None = None) -> Plan:
    """The ranks and resources of a run on Slurm; `het` overrides `slurm.het`.

    Raises:
        UserError: a node cannot hold a cell.
    """
    layout = Layout.of(config)
    gres, per_node = _cell_gres(config)
    per_node = min(per_node, layout.engines)
    nodes = ceil(layout.engines / per_node)
    if config.slurm.het if het is None else het:
        cells = _placed(nodes, layout.engines, per_node, config.slurm.cells, gres)
        hosts = _placed(layout.hosts, layout.hosts, 1, config.slurm.hosts, config.slurm.hosts.gres)
        return Plan(layout, per_node, (cells, hosts))
    # Ranks are dealt out to the nodes in turn, so every node gets its cells before any gets a host.
    flat = _placed(nodes, layout.ranks, ceil(layout.ranks / nodes), config.slurm.cells, gres)
    return Plan(layout, per_node, (flat,))
