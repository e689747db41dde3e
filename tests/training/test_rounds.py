"""The core where a round has to be done again, or no step can be taken; with fakes of everything around it."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from gyre.errors import ReduceFailed
from gyre.store import Store
from gyre.training import worker
from gyre.training.part import Desk, Sum
from gyre.training.trainer import Trainer
from gyre.training.update import CorePart
from gyre.training.worker import Worker
from tests.training.cells import make_config

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


@pytest.mark.parametrize("norm, skipped", [(1.0, 0.0), (0.0, 0.0), (math.nan, 1.0), (math.inf, 1.0)])
def test_an_update_tells_whether_its_step_was_skipped(norm, skipped):
    trainer = Trainer(SimpleNamespace())
    trainer._config, published = make_config(), []
    trainer._crew = SimpleNamespace(step=lambda *known: norm)
    trainer._publish = published.append
    part = CorePart(
        Desk(Store(dist.HashStore(), "test"), Claims(), (0, 1), lambda event: None), trainer._crew, Sum(3), 1, [0]
    )
    metrics = trainer._step(part)
    assert metrics["skipped"] == skipped
    assert published == [3], "the others wait for it, whether weights have changed or not"
