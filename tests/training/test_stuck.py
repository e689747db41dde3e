"""Whoever is stuck falls silent, and whoever waits for it goes on."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch.distributed as dist

from gyre.training import gradients, stream
from gyre.training.gradients import Groups, ReduceFailed
from gyre.training.stream import Pulse, beating


class Counter:
    """A store of one counter."""

    value = 0

    def clone(self):
        return self

    def add(self, key, amount):
        self.value += amount
        return self.value


@contextmanager
def beats(monkeypatch, member, pulse):
    monkeypatch.setattr(stream, "BEAT_SECONDS", 0.01)
    counter = Counter()
    with beating(counter, 1, member, pulse):
        yield counter


def until(condition, timeout=10.0):
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_member_that_is_stuck_falls_silent_and_one_that_goes_on_is_heard(monkeypatch, caplog):
    pulse = Pulse(limit=0.1)
    with beats(monkeypatch, (1, 1), pulse) as counter:
        until(lambda: "stuck" in caplog.text)
        silent = counter.value
        time.sleep(0.1)
        assert counter.value == silent
        pulse.beat()
        until(lambda: counter.value > silent)
    assert 5 <= silent <= 20


def test_a_busy_member_is_heard_for_as_long_as_it_goes_on(monkeypatch, caplog):
    pulse = Pulse(limit=1.0)
    with beats(monkeypatch, (1, 1), pulse) as counter:

        def goes_on():
            pulse.beat()
            return counter.value > 150

        until(goes_on)
    assert "stuck" not in caplog.text


def test_a_core_that_is_stuck_ends_its_process(monkeypatch):
    ended = []
    monkeypatch.setattr(stream.os, "_exit", ended.append)
    with beats(monkeypatch, (0, 1), Pulse(limit=0.05)):
        until(lambda: ended)
        time.sleep(0.05)
    assert ended == [1]


def test_a_group_that_does_not_come_about_is_left_behind(monkeypatch):
    release = threading.Event()
    groups = Groups(dist.HashStore, 0, "cpu", "127.0.0.1", timeout=0.3)
    monkeypatch.setattr(gradients, "open_group", lambda *_: release.wait(30))
    begun = time.monotonic()
    with pytest.raises(ReduceFailed, match="in time"):
        groups.build_prefixes("g1", [0, 1, 2])
    with pytest.raises(ReduceFailed, match="called off"):
        groups.get("g1", [0, 1], lambda: True)
    assert time.monotonic() - begun < 5
    release.set()


def test_groups_that_are_built_together_share_a_client():
    """Each one keeps its client, and the store's host has a connection for each of all workers."""
    store, ranks, clients = dist.HashStore(), [0, 1, 2], []

    def connect():
        clients.append(store)
        return store

    everyone = [Groups(connect, rank, "cpu", "127.0.0.1", timeout=20) for rank in ranks]
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda groups: groups.build_prefixes("g1", ranks), everyone))
    assert [len(groups._groups) for groups in everyone] == [2, 2, 1]
    assert len(clients) == len(ranks)
