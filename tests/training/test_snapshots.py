"""Slots are leased to readers, recycled when free, served to other hosts, and nothing of them stays behind."""

import dataclasses
import multiprocessing
import os
import signal
import threading
import time

import pytest
import torch

from gyre.checksum import checksum
from gyre.errors import WeightsMismatch
from gyre.shared_memory import SHARED, remove_shared, shared_prefix
from gyre.store import Store
from gyre.training.slots import Slots, Spec
from gyre.training.snapshots import Server, pull

HERE, SECRET = "here", "secret"


def weights(seed: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {
        "model.layers.0.mlp.up_proj.weight": torch.randn(16, 8, generator=random).bfloat16(),
        "model.norm.weight": torch.randn(8, generator=random),
    }


class World:
    def __init__(self, run_dir, count=2):
        self.run_dir = run_dir
        self.store = Store.host("gyre/test/1", "127.0.0.1")
        self.prefix = shared_prefix(run_dir, 1)
        self.slots = Slots(self.prefix, count, lambda held, new: held == new - 1, patience=0.3)
        self.server = Server(self.prefix, SECRET, "127.0.0.1")
        threading.Thread(target=self.server.serve, daemon=True).start()

    def write(self, snapshot: int):
        tensors = weights(snapshot)
        specs = [Spec(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()]
        written = self.slots.write(snapshot, tensors.items(), specs)
        assert written.checksum == checksum(tensors.items())
        announced = dataclasses.replace(written, node=HERE, url=self.server.url)
        self.store.set(f"snapshot/{snapshot}", announced.encode())
        return announced

    def pull(self, snapshot: int, address: str = HERE, secret: str = SECRET, timeout: float = 5.0):
        return pull(self.store, snapshot, self.run_dir, secret, address, timeout, verify=True)

    def shared(self) -> list[str]:
        return sorted(path.name.removeprefix(self.prefix) for path in SHARED.glob(shared_prefix(self.run_dir) + "*"))


@pytest.fixture
def world(tmp_path):
    world = World(tmp_path / "run")
    yield world
    world.server.close()
    world.slots.close()
    assert world.shared() == []


def same(pulled, snapshot: int) -> bool:
    wanted, found = weights(snapshot), dict(pulled.tensors())
    return wanted.keys() == found.keys() and all(torch.equal(wanted[name], found[name]) for name in wanted)


@pytest.mark.parametrize("address", [HERE, "another host"])
def test_readers_get_what_was_written(world, address):
    world.write(0)
    with world.pull(0, address) as pulled:
        assert pulled.copied == (address != HERE)
        assert pulled.snapshot == 0 and same(pulled, 0)
        from safetensors.torch import load_file

        assert load_file(pulled.path).keys() == weights(0).keys()  # it is a safetensors file
    assert world.shared() == ["slot0"]


def test_a_slot_that_is_read_is_not_overwritten(world):
    world.write(0)
    with world.pull(0) as old:
        for snapshot in (1, 2, 3):  # two slots, one of them leased
            world.write(snapshot)
            assert same(old, 0)
            with world.pull(snapshot) as new:
                assert same(new, snapshot)
    assert len(world.shared()) == 2
    with pytest.raises(WeightsMismatch, match="is gone"):
        world.pull(0)


def test_slots_are_recycled_once_their_readers_left(world):
    world.write(0)
    with world.pull(0) as pulled:
        inode = os.stat(pulled.path).st_ino
    world.write(1)
    world.write(2)
    with world.pull(2) as pulled:
        assert os.stat(pulled.path).st_ino == inode
    with pytest.raises(WeightsMismatch, match="is gone"):
        world.pull(0)
    with pytest.raises(WeightsMismatch, match="404"):
        world.pull(0, "another host")


def _hold(path, ready):
    import fcntl

    descriptor = os.open(path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    ready.set()
    time.sleep(60)


def test_a_dead_reader_gives_its_lease_back(world):
    announced = world.write(0)
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    reader = context.Process(target=_hold, args=(announced.path, ready))
    reader.start()
    assert ready.wait(10)
    inode = os.stat(announced.path).st_ino
    os.kill(reader.pid, signal.SIGKILL)
    reader.join()
    world.write(1)
    begun = time.monotonic()
    assert os.stat(world.write(2).path).st_ino == inode  # the slot itself: nobody waited for the dead
    assert time.monotonic() - begun < 0.3


def test_altered_weights_are_noticed(world):
    announced = world.write(0)
    with open(announced.path, "r+b") as file:
        file.seek(announced.bytes - 2)
        byte = file.read(1)
        file.seek(announced.bytes - 2)
        file.write(bytes([byte[0] ^ 1]))
    for address in (HERE, "another host"):
        with pytest.raises(WeightsMismatch, match="digest"):
            world.pull(0, address)
    assert world.shared() == ["slot0"]


def test_strangers_and_late_snapshots_are_refused(world):
    world.write(0)
    with pytest.raises(WeightsMismatch, match="401"):
        world.pull(0, "another host", secret="guessed")
    with pytest.raises(WeightsMismatch, match="not announced"):
        world.pull(5, timeout=0.1)


def test_leftovers_of_killed_attempts_are_removed(tmp_path):
    run, other = tmp_path / "a" / "run", tmp_path / "b" / "run"
    names = [shared_prefix(run, 1) + "slot0", shared_prefix(run, 12) + "pulled-3", shared_prefix(run, 2) + "slot0"]
    neighbour = shared_prefix(other, 1) + "slot0"
    for name in (*names, neighbour):
        (SHARED / name).touch()
    try:
        assert sorted(remove_shared(run, keep_attempt=2)) == sorted(names[:2])
        assert (SHARED / names[2]).exists() and (SHARED / neighbour).exists()
        assert remove_shared(run) == [names[2]]
    finally:
        remove_shared(other)
    assert not (SHARED / neighbour).exists()
