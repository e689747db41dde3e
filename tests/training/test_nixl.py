"""Pulls over NIXL, where it is installed: `pip install nixl`."""

import dataclasses
import subprocess
import sys
import time

import pytest
import torch

from gyre.errors import WeightsMismatch
from gyre.shared_memory import shared_prefix
from gyre.training.nixl_transport import installed
from gyre.training.pulling import reach
from gyre.training.slots import Slots, Spec

pytestmark = pytest.mark.skipif(not installed(), reason="NIXL is not installed")

SECRET = "secret"
SERVER = """
import sys
sys.path[:] = sys.argv[2:]
from gyre.training.snapshots import Server
server = Server(sys.argv[1], "secret", "127.0.0.1")
print(server.url, flush=True)
server.serve()
"""


@pytest.fixture
def lent(tmp_path):
    """Slots, what was written, how to announce it, and the server's process."""
    prefix = shared_prefix(tmp_path, 1)
    slots = Slots(prefix, 1, lambda held, new: False, patience=0.3)
    weights = {"model.norm.weight": torch.randn(77), "model.layers.0.mlp.up_proj.weight": torch.randn(10_000_019)}
    specs = [Spec(name, t.dtype, tuple(t.shape)) for name, t in weights.items()]
    command = [sys.executable, "-c", SERVER, prefix, *sys.path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        url = next(line.strip() for line in server.stdout if line.startswith("http://"))

        def write(snapshot):
            return dataclasses.replace(slots.write(snapshot, weights.items(), specs), url=url).encode()

        yield weights, write, server
        server.kill()
    slots.close()


def nixl(word, secret=SECRET):
    return reach(word, secret, "elsewhere", how="nixl", timeout=20)


def test_what_is_pulled_is_what_was_written(lent):
    weights, write, _ = lent
    for snapshot in (0, 1):
        own = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
        with nixl(write(snapshot)) as source:
            assert source.snapshot == snapshot
            source.copy_into(own)
        assert all(torch.equal(own[name], weights[name]) for name in weights)
        weights["model.norm.weight"] += 1


def test_strangers_and_snapshots_that_are_gone_get_nothing(lent):
    _, write, _ = lent
    old = write(0)
    with pytest.raises(WeightsMismatch, match="401"):
        nixl(old, "guessed")
    write(1)
    with pytest.raises(WeightsMismatch, match="404"):
        nixl(old)


def test_a_slot_stays_as_long_as_it_is_lent(lent):
    weights, write, _ = lent
    own = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    with nixl(write(0)) as source:
        begun = time.monotonic()
        write(1)  # into fresh memory: the slot is left to its reader
        assert time.monotonic() - begun >= 0.3
        source.copy_into(own)
    assert all(torch.equal(own[name], weights[name]) for name in weights)


def test_a_server_that_died_is_noticed(lent):
    weights, write, server = lent
    with nixl(write(0)) as source:
        server.kill()
        server.wait()
        with pytest.raises(WeightsMismatch, match="over NIXL"):
            source.copy_into({name: torch.zeros_like(tensor) for name, tensor in weights.items()})
