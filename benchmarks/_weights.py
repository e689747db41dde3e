"""Pulls of a snapshot beside what they cannot beat: a memcpy on the same host, a bare socket between processes.

    rows(gib=0.25, repeats=9)       figures as a list of dictionaries; see `Row`

Each pair is measured alternately, one right after the other, so that both meet the same machine; the ratio is the
median of the pairs' ratios. Every pull is verified: number and generation of the snapshot, digests of all tensors. The
memcpy is torch's, with one thread; a pull on the same host has as many threads as it takes by itself, or one. The
weight server and the sender of the bare socket are processes of their own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also where gyre is not installed

SECRET = "weights"


@dataclass(frozen=True)
class Row:
    """One comparison; rates in GB/s (10^9 bytes), of the median pair."""

    what: str
    rate: float
    reference: str
    reference_rate: float
    ratio: float
    wanted: float | None  # the ratio that it must have


def _shapes(gib: float) -> Iterator[tuple[str, tuple[int, ...]]]:
    """A decoder's tensors, of this size in bfloat16 altogether."""
    hidden = 1024
    yield "model.embed_tokens.weight", (16384, hidden)
    for layer in range(max(1, round((gib * 2**29 - 16384 * hidden) / (hidden * hidden * 11.5)))):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", (hidden,)
        for name, rows in (("q_proj", hidden), ("k_proj", hidden // 4), ("v_proj", hidden // 4), ("o_proj", hidden)):
            yield f"{prefix}self_attn.{name}.weight", (rows, hidden)
        for name in ("gate_proj", "up_proj", "down_proj"):
            yield f"{prefix}mlp.{name}.weight", (3 * hidden, hidden)
    yield "model.norm.weight", (hidden,)


@contextlib.contextmanager
def _program(*arguments: str) -> Iterator[str]:
    """A process of this file, and the line that it says when it is ready."""
    with subprocess.Popen([sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.kill()


def rows(gib: float = 0.25, repeats: int = 9) -> list[dict[str, Any]]:
    """Measure with a snapshot of `gib` GiB."""
    import torch

    from gyre.training.slots import Slots, Spec

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    prefix = f"gyre-benchmark-{os.getpid()}-"
    slots = Slots(prefix, 2, lambda held, new: held == new - 1)
    try:
        weights = {name: torch.randn(shape).bfloat16() for name, shape in _shapes(gib)}
        specs = [Spec(name, t.dtype, tuple(t.shape)) for name, t in weights.items()]
        announced = slots.write(0, weights.items(), specs)
        with _program("serve", prefix) as url, _program("send", announced.path) as port:
            announced = dataclasses.replace(announced, node="here", url=url)
            return [asdict(row) for row in _measure(weights, specs, slots, announced, int(port), repeats)]
    finally:
        slots.close()
        torch.set_num_threads(before)


def _measure(weights: Any, specs: Any, slots: Any, announced: Any, port: int, repeats: int) -> Iterator[Row]:
    import torch

    from gyre.training import pulling

    word = announced.encode()
    own = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    buffer = memoryview(bytearray(announced.bytes))
    numbers = iter(range(1, 1 << 30))
    count = pulling.threads_for(announced.bytes)

    def fresh() -> dict[str, torch.Tensor]:
        return {name: torch.empty_like(tensor) for name, tensor in weights.items()}

    def memcpy(target: dict[str, torch.Tensor]) -> None:
        for name, tensor in weights.items():
            target[name].copy_(tensor)

    def pull(target: dict[str, torch.Tensor], address: str) -> None:
        with pulling.reach(word, SECRET, address) as source:
            source.copy_into(target)

    def alone(target: dict[str, torch.Tensor]) -> None:
        usual, pulling.threads_for = pulling.threads_for, lambda size: 1
        try:
            pull(target, "here")
        finally:
            pulling.threads_for = usual

    def write() -> None:
        slots.write(next(numbers), weights.items(), specs)

    def bare() -> None:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            view = buffer
            while view:
                view = view[connection.recv_into(view) :]

    pairs: list[tuple[str, Callable[[], None], str, Callable[[], None], float | None]] = [
        (f"pull, same host, {count} threads", lambda: pull(own, "here"), "memcpy", lambda: memcpy(own), 0.5),
        ("pull, same host, one thread", lambda: alone(own), "memcpy", lambda: memcpy(own), None),
        ("pull, between processes", lambda: pull(own, "elsewhere"), "bare socket", bare, 0.8),
        ("pull, same host, into new memory", lambda: pull(fresh(), "here"), "memcpy", lambda: memcpy(fresh()), None),
        ("write a snapshot, with its checksum", write, "memcpy", lambda: memcpy(own), None),
    ]
    for what, ours, reference, theirs, wanted in pairs:
        ours(), theirs()  # pages are touched, connections known
        times = [(_seconds(ours), _seconds(theirs)) for _ in range(repeats)]
        rate, reference_rate = (announced.bytes / 1e9 / median(pair[i] for pair in times) for i in (0, 1))
        yield Row(what, rate, reference, reference_rate, median(b / a for a, b in times), wanted)
    for name, tensor in weights.items():
        assert torch.equal(own[name], tensor), name


def _seconds(work: Callable[[], None]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def _serve(prefix: str) -> None:
    from gyre.training.snapshots import Server

    server = Server(prefix, SECRET, "127.0.0.1")
    print(server.url, flush=True)
    server.serve()


def _send(path: str) -> None:
    """Send a file, whole and from memory, to whoever connects."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
        view = memoryview(memory)
        sum(view[::4096])  # all pages are there
        with socket.create_server(("127.0.0.1", 0)) as listener:
            print(listener.getsockname()[1], flush=True)
            while True:
                connection, _ = listener.accept()
                with connection, contextlib.suppress(OSError):
                    connection.sendall(view)


if __name__ == "__main__":
    {"serve": _serve, "send": _send}[sys.argv[1]](sys.argv[2])
