"""The core's part in rounds that have to be done again: what it holds on to, with fakes of everything around it."""

import json
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from gyre.errors import ReduceFailed
from gyre.store import Store
from gyre.training import worker
from gyre.training.part import Desk, Sum
from gyre.training.update import CorePart
from gyre.training.worker import Worker

SATELLITE = (1, 1)


class Claims:
    """A feeder that bars a satellite by itself, at a time of its own."""

    def __init__(self) -> None:
        self.bars = 0
        self.gone: set = set()

    def barred(self, update):
        return self.gone

    def settle(self, update, ledgers, final):
        self.gone = {SATELLITE}
        return {"ok": False, "fault": "a ledger of one that is barred"}


class Workers:
    """One worker, of the core, whose reduces go as they are told to."""

    in_flight: set = set()

    def __init__(self, monkeypatch, fails: bool) -> None:
        self.own = Worker.__new__(Worker)
        self.own.number, self.own._core, self.own._total = 0, True, None
        self.own._groups = SimpleNamespace(get=lambda *known: None, forget=lambda *known: None)
        self.own.model = SimpleNamespace(accumulators=SimpleNamespace(flat=SimpleNamespace(data=torch.ones(8))))

        def reduce_to_root(group, source, target, *known):
            target.fill_(2)
            if fails:
                raise ReduceFailed("its group is dead")

        monkeypatch.setattr(worker, "reduce_to_root", reduce_to_root)

    def __getattr__(self, name):
        return getattr(self.own, name)


@pytest.mark.parametrize("fails", [True, False])
def test_a_round_that_is_done_again_leaves_no_total_behind(monkeypatch, fails):
    """It would stay where the satellite was the only one: no reduce follows that takes its place."""
    crew = Workers(monkeypatch, fails)
    store = Store(dist.HashStore(), "test")
    store.set("stream/1/round/0/1", json.dumps({"micro_steps": [1], "statistics": {}, "seconds": 0.0}))
    store.set("stream/1/round/0/1/again", "1")
    part = CorePart(Desk(store, Claims(), (0, 1), lambda event: None), crew, Sum(1), 1, [0, 1])
    assert not part._round([SATELLITE], final=True)
    assert store.get("stream/1/round/0/verdict") == "again"
    assert crew.own._total is None
    assert torch.equal(crew.own.model.accumulators.flat.data, torch.ones(8))
