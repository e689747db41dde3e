"""The numbers that the scheduler decides by, taken from the configuration. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from gyre.config import Config


@dataclass(frozen=True)
class Settings:
    """Sizes, budgets and thresholds of one run; times in seconds."""

    cells: int
    slots: int
    batch_groups: int
    group_size: int
    updates: int
    standalone: int = 0
    hosts: int = 1
    host_executions: int = 256
    tries: int = 2
    lookahead: float = 0.25
    supply_fraction: float = 0.25
    supply_hold: float = 10.0
    top_ups: int = 3
    updates_per_batch: int = 1
    max_staleness: int = 2
    max_lag: int = 2
    trainers: int = 0  # cells that only train (a fixed split)
    longest_first: bool = False
    adapt_lookahead: bool = False

    @classmethod
    def of(cls, config: Config) -> Settings:
        """The settings of a configured run."""
        rollout, elastic = config.scheduler.rollout_cells, config.scheduler.policy == "elastic"
        return cls(
            cells=config.cells.count,
            slots=config.cells.slots,
            batch_groups=config.scheduler.batch_groups,
            group_size=config.scheduler.group_size,
            updates=config.train.updates,
            standalone=config.cells.standalone,
            hosts=config.hosts.count,
            host_executions=config.hosts.executions,
            tries=config.harness.tries,
            lookahead=config.scheduler.lookahead,
            supply_fraction=config.scheduler.supply_fraction,
            supply_hold=config.scheduler.supply_hold,
            top_ups=config.scheduler.top_ups,
            updates_per_batch=config.train.updates_per_batch,
            max_staleness=config.train.max_staleness,
            max_lag=config.serving.max_lag,
            trainers=0 if rollout is None else config.cells.count - rollout,
            longest_first=elastic and config.scheduler.elastic.longest_first,
            adapt_lookahead=elastic and config.scheduler.elastic.adapt_lookahead,
        )

    @property
    def engines(self) -> int:
        """Cells and standalone engines; the ranks from here on are harness hosts."""
        return self.cells + self.standalone

    @property
    def batches(self) -> int:
        """Batches of the whole run."""
        return self.updates // self.updates_per_batch

    def outstanding_groups(self, lookahead: float) -> int:
        """Groups wanted outstanding at the start of a burst: (1 + lookahead) batches."""
        # The small term undoes the rounding of, for example, 1.15 * 20 = 22.999999999999996.
        return int((1 + lookahead) * self.batch_groups + 1e-9)

    def quota(self, version: int, outstanding: int, lookahead: float) -> int:
        """Groups to dispatch at the start of the burst after policy `version`, with `outstanding` groups untrained.

        The first quota is (1 + lookahead) batches; a later one is a batch, and makes up for groups that were dropped;
        none exceeds what the batches that are left need.
        """
        needed = (self.batches - version) * self.batch_groups
        return max(0, min(self.outstanding_groups(lookahead), needed) - outstanding)
