"""What is pulled is what was written, whatever breaks on the way; and no reader holds a slot, or a thread, for ever."""

import dataclasses
import json
import multiprocessing
import socket
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.checksum import checksum
from gyre.errors import UserError, WeightsMismatch
from gyre.shared_memory import SHARED, shared_prefix
from gyre.training import nixl_transport
from gyre.training.digest import ROW, WORD, hashed, raw, rows_of, sum_rows
from gyre.training.pulling import _batches, reach
from gyre.training.slots import Filled, Slots, Spec, fill
from gyre.training.snapshot_file import Place
from gyre.training.snapshots import Server

SECRET = "secret"
BIG = 6 << 20  # elements: more bytes than the buffers of two sockets hold


def weights(seed: int, big: int = 700_001) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {
        "model.layers.0.mlp.up_proj.weight": torch.randn(1, big, generator=random).bfloat16(),  # an odd size
        "model.layers.0.norm.weight": torch.randn(6, generator=random).bfloat16(),
        "model.layers.1.mlp.up_proj.weight": torch.randn(big, 2, generator=random),
        "model.layers.1.bias": torch.empty(0),
        "model.norm.weight": torch.randn(8, generator=random),
    }


def specs_of(tensors) -> list[Spec]:
    return [Spec(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()]


def empty(tensors) -> dict[str, torch.Tensor]:
    return {name: torch.full_like(tensor, -1) for name, tensor in tensors.items()}


def equal(left, right) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


class World:
    def __init__(self, run_dir):
        self.prefix = shared_prefix(run_dir, 1)
        self.slots = Slots(self.prefix, 1, lambda held, new: False, patience=0.2)
        self.servers: list[Server] = []
        self.url = self.serve().url

    def serve(self, port: int = 0, stall: float = 30.0) -> Server:
        server = Server(self.prefix, SECRET, "127.0.0.1", port, stall)
        threading.Thread(target=server.serve, daemon=True).start()
        self.servers.append(server)
        return server

    def write(self, snapshot: int, tensors) -> None:
        self.announced = self.slots.write(snapshot, tensors.items(), specs_of(tensors))

    def word(self, url: str | None = None, node: str = "here") -> str:
        return dataclasses.replace(self.announced, node=node, url=url or self.url).encode()

    def reach(self, address: str = "elsewhere", url: str | None = None, timeout: float = 5.0, secret: str = SECRET):
        return reach(self.word(url), secret, address, timeout=timeout)


@pytest.fixture
def world(tmp_path):
    world = World(tmp_path / "run")
    yield world
    world.slots.close()
    for server in world.servers:
        server.close()
    assert not list(SHARED.glob(world.prefix + "*"))


# -- copies ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("address", ["here", "elsewhere"])
def test_tensors_come_to_where_they_are_wanted(world, address, threads, monkeypatch):
    for module in ("slots", "pulling"):
        monkeypatch.setattr(f"gyre.training.{module}.threads_for", lambda size: threads)
    before = torch.get_num_threads()
    wanted = weights(1)
    world.write(0, wanted)
    own = empty(wanted)
    with world.reach(address) as source:
        source.copy_into(own)
        assert equal(own, wanted) and checksum(own.items()) == source.checksum
        source.verify()  # through a buffer, in which small and odd tensors lie one after the other
        some = ["model.norm.weight", "model.layers.0.norm.weight"]  # a stage has a part of them
        part = empty({name: wanted[name] for name in some})
        source.copy_into(part)
        assert equal(part, {name: wanted[name] for name in some})
    assert torch.get_num_threads() == before


def test_memory_that_was_copied_into_can_be_given_back(world):
    wanted = {"model.norm.weight": torch.randn(1000)}
    world.write(0, wanted)
    own = empty(wanted)
    with world.reach("here") as source:
        source.copy_into(own)
    own["model.norm.weight"].untyped_storage().resize_(0)  # torch refuses that once numpy has seen it


@pytest.mark.parametrize("address", ["here", "elsewhere"])
def test_what_does_not_fit_or_was_altered_is_refused(world, address):
    wanted = weights(1, 1000)
    world.write(0, wanted)
    name = "model.layers.1.mlp.up_proj.weight"
    with world.reach(address) as source:
        with pytest.raises(WeightsMismatch, match="does not fit the model"):
            source.copy_into({name: torch.empty(2, 1000)})
        with pytest.raises(WeightsMismatch, match="lacks other"):
            source.copy_into({"other": torch.empty(2)})
    with open(world.announced.path, "r+b") as file:
        file.seek(world.announced.bytes - 33)
        file.write(b"\0")  # of the last element of the large tensor
    with world.reach(address) as source:
        source.copy_into({"model.norm.weight": torch.empty(8)})
        with pytest.raises(WeightsMismatch, match=f"{name} has digest"):
            source.copy_into(empty(wanted))
    with open(world.announced.path, "r+b") as file:
        at = file.read(world.announced.header).index(b'"digests":"') + 11
        file.seek(at)
        file.write(b"?")
    with pytest.raises(WeightsMismatch, match="its header was altered"):
        world.reach(address)


# -- writing -----------------------------------------------------------------------------------------------------------
def _fill(path, seed, names, answers):
    tensors = weights(seed)
    answers.put(json.dumps(dataclasses.asdict(fill(path, [(name, tensors[name]) for name in names]))))


def test_a_slot_is_filled_by_several_processes(world):
    wanted = weights(2)
    names = list(wanted)
    context = multiprocessing.get_context("spawn")  # a fork of threads that compute may hang
    answers = context.Queue()
    with world.slots.begin(5, specs_of(wanted)) as writing:
        there = context.Process(target=_fill, args=(writing.path, 2, names[2:], answers))
        there.start()
        here = fill(writing.path, [(name, wanted[name]) for name in names[:2]])
        world.announced = writing.seal([here, Filled(**json.loads(answers.get(timeout=30)))])
        there.join()
    assert world.announced.checksum == checksum(wanted.items())
    own = empty(wanted)
    with world.reach("here") as source:
        source.copy_into(own)
    assert equal(own, wanted)


def test_a_slot_that_was_not_filled_holds_no_snapshot(world):
    wanted = weights(3, 1000)
    world.write(0, wanted)
    with pytest.raises(WeightsMismatch, match="model.norm.weight was not written once"):
        with world.slots.begin(1, specs_of(wanted)) as writing:
            with pytest.raises(WeightsMismatch, match="has no place for"):
                fill(writing.path, [("model.norm.weight", torch.empty(9))])
            with pytest.raises(WeightsMismatch, match="is gone"):
                world.reach("here")  # the old one, while the new one is written
            writing.seal([fill(writing.path, list(wanted.items())[:-1])])
    assert world.slots.path_of(0) is None and world.slots.path_of(1) is None
    for address, why in (("here", "is gone"), ("elsewhere", "404")):
        with pytest.raises(WeightsMismatch, match=why):
            world.reach(address)
    world.write(2, wanted)  # and it can be used again
    with world.reach() as source:
        source.copy_into(empty(wanted))


# -- what breaks on the way --------------------------------------------------------------------------------------------
class Relay:
    """Passes connections on to a server, each only until so many bytes came back (None: all of them)."""

    def __init__(self, url: str, limits: list[int | None]) -> None:
        self._port = int(url.rsplit(":", 1)[1])
        self._limits = limits
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.connections = 0
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        for limit in self._limits:
            client, _ = self._listener.accept()
            self.connections += 1
            server = socket.create_connection(("127.0.0.1", self._port))
            forth = threading.Thread(target=self._pass, args=(client, server, None), daemon=True)
            forth.start()
            self._pass(server, client, limit)
            client.close()
            server.close()
        self._listener.close()

    @staticmethod
    def _pass(source: socket.socket, sink: socket.socket, limit: int | None) -> None:
        passed = 0
        try:
            while data := source.recv(1 << 16 if limit is None else min(1 << 16, limit - passed)):
                sink.sendall(data)
                passed += len(data)
                if passed == limit:
                    sink.shutdown(socket.SHUT_RDWR)
                    source.shutdown(socket.SHUT_RDWR)
                    return
        except OSError:
            pass


def test_a_connection_that_breaks_is_made_again_and_goes_on_where_it_was(world):
    wanted = weights(4)
    world.write(0, wanted)
    relay = Relay(world.url, [10, 100_000, 1_000_000, None])
    own = empty(wanted)
    with world.reach(url=relay.url) as source:
        source.copy_into(own)
    assert equal(own, wanted) and relay.connections == 4


def test_one_that_always_breaks_is_given_up(world):
    wanted = weights(4)
    world.write(0, wanted)
    relay = Relay(world.url, [100_000, 200, 200, 200])  # the head of an answer is longer
    with world.reach(url=relay.url) as source:
        with pytest.raises(WeightsMismatch, match="at byte"):
            source.copy_into(empty(wanted))
    assert relay.connections in (3, 4)


def test_a_server_that_was_started_again_goes_on(world):
    wanted = weights(5)
    world.write(0, wanted)
    own = empty(wanted)
    relay = Relay(world.url, [100_000])

    def again() -> None:
        relay.thread.join()
        world.serve(int(relay.url.rsplit(":", 1)[1]))

    threading.Thread(target=again).start()
    with world.reach(url=relay.url) as source:
        source.copy_into(own)
    assert equal(own, wanted)


def test_a_slot_that_is_recycled_in_the_middle_is_noticed(world):
    old, new = weights(6), weights(7)
    world.write(0, old)
    own = empty(old)
    with world.reach() as source:
        source.copy_into({"model.norm.weight": own["model.norm.weight"]})
        world.write(1, new)
        with pytest.raises(WeightsMismatch, match="404"):
            source.copy_into(own)
    with world.reach() as source:
        source.copy_into(own)
    assert equal(own, new)


def test_a_reader_that_does_not_read_loses_its_lease(world):
    wanted = {"model.norm.weight": torch.zeros(BIG)}
    world.write(0, wanted)
    server = world.serve(stall=0.3)
    inode = SHARED.joinpath(world.announced.path).stat().st_ino
    with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1]))) as idle:
        head = f"GET /snapshot/0/{world.announced.generation} HTTP/1.1\r\nAuthorization: Bearer {SECRET}\r\n"
        idle.sendall(f"{head}Range: bytes=0-{world.announced.bytes - 1}\r\n\r\n".encode())
        assert idle.recv(12) == b"HTTP/1.1 206"
        world.slots._patience = 30.0
        world.write(1, wanted)  # waits until the server has given the idle reader up
        assert SHARED.joinpath(world.announced.path).stat().st_ino == inode


def test_a_server_that_does_not_answer_is_given_up(world):
    world.write(0, weights(8, 10))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        with pytest.raises(WeightsMismatch, match=r"nothing came in 0.2 s"):
            world.reach(url=f"http://127.0.0.1:{silent.getsockname()[1]}", timeout=0.2)


def test_nixl_is_taken_where_it_is_worth_it_and_a_socket_where_that_fails(world, monkeypatch):
    wanted = weights(8, 10)
    world.write(0, wanted)
    tried = []

    def fails(announcement, secret, timeout):
        tried.append(announcement.snapshot)
        raise WeightsMismatch("501")

    monkeypatch.setattr(nixl_transport, "Nixl", fails)
    monkeypatch.setattr(nixl_transport, "worth_it", lambda: True)
    for how, fell_back in (("auto", True), ("socket", False)):
        own, before = empty(wanted), len(tried)
        with reach(world.word(), SECRET, "elsewhere", how=how) as source:
            source.copy_into(own)
        assert equal(own, wanted) and len(tried) == before + fell_back
    with pytest.raises(WeightsMismatch, match="501"):
        reach(world.word(), SECRET, "elsewhere", how="nixl")
    assert reach(world.word(), SECRET, "here", how="nixl").snapshot == 0  # on one host there is something better


def test_nixl_that_is_not_installed_is_said_in_a_line(world, monkeypatch):
    world.write(0, weights(8, 10))
    monkeypatch.setattr(nixl_transport, "installed", lambda: False)
    with pytest.raises(UserError, match="network.weights is nixl, which is not installed here"):
        reach(world.word(), SECRET, "elsewhere", how="nixl")


def test_strangers_and_senseless_ranges_are_refused(world):
    world.write(0, weights(9, 10))
    with pytest.raises(WeightsMismatch, match="401"):
        world.reach(secret="guessed")
    world.announced = dataclasses.replace(world.announced, header=world.announced.bytes + 1)
    with pytest.raises(WeightsMismatch, match="416"):
        world.reach()


# -- what it is made of ------------------------------------------------------------------------------------------------
@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9000), st.booleans()), max_size=6), st.integers(1, 4).map(lambda n: n * ROW))
def test_batches_hold_every_byte_once_and_in_order(sizes, limit):
    places, at = [], 100
    for size, gap in sizes:
        at += 64 * gap
        places.append(Place(Spec("t", torch.int8, (size,)), at, at + size, ""))
        at += size
    read = []
    batches = _batches(places, limit)
    for batch in batches:
        taken = end = 0
        for part in batch.parts:
            assert places[part.index].begin + part.begin == batch.begin + taken
            assert part.begin % ROW == 0  # the sums of its rows are its own
            assert part.at % WORD == 0 and end <= part.at < end + WORD  # words are summed where they lie
            end = part.at + part.end - part.begin
            read += [(part.index, byte) for byte in range(part.begin, part.end)]
            taken += part.end - part.begin
        assert 0 < taken and end <= limit and batch.begin + taken <= batch.until
    assert read == [(i, byte) for i, place in enumerate(places) for byte in range(place.end - place.begin)]
    held = [place for place in places if place.end > place.begin]
    gaps = {place.end for place in held} - {place.begin for place in held}
    assert {batch.until for batch in batches} == gaps  # one request for all bytes without a gap


@pytest.mark.parametrize("size", [1, 8, ROW - 1, ROW, 3 * ROW + 5])
def test_a_digest_is_of_the_bytes_wherever_they_are(size):
    data = torch.randint(0, 256, (size + 3,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))

    def digest(tensor):
        sums = torch.empty(rows_of(size), dtype=torch.int64)
        sum_rows(raw(tensor), sums)
        return hashed(sums)

    assert digest(data[3:]) == digest(data[3:].clone())
    for at in (3, size // 2 + 3, size + 2):
        changed = data.clone()
        changed[at] ^= 1
        assert digest(changed[3:]) != digest(data[3:])
