"""Digests of bytes that are copied: quick enough to be taken of every piece while it is still in the cache.

The checksum of weights (`gyre.checksum`) does not depend on how they are laid out, so that an engine can compute it;
that costs several passes. Whoever copies bytes as they are compares a digest: the bytes count as 64-bit words, the
words of every 2 KiB (`ROW`) are added up modulo 2^64, and the sums are hashed in their order. What was lost, altered,
taken from another snapshot or put in another place changes a sum. It is no defence against somebody who
wants two sums to agree.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

ROW = 2048  # bytes of a sum
WORD = 8
_MOST_THREADS = 4
_WORTH_A_THREAD = 16 << 20  # bytes


def rows_of(size: int) -> int:
    """How many sums there are of `size` bytes."""
    return -(-size // ROW)


def sum_rows(data: torch.Tensor, out: torch.Tensor) -> None:
    """Sums of the rows of some bytes (uint8, contiguous, on the CPU) into `out` (int64); the last row may be short."""
    whole = len(data) // ROW
    if whole:
        torch.sum(data[: whole * ROW].view(torch.int64).view(whole, ROW // WORD), 1, out=out[:whole])
    if rest := len(data) - whole * ROW:
        last = torch.zeros(ROW, dtype=torch.uint8)
        last[:rest] = data[whole * ROW :]
        out[whole] = last.view(torch.int64).sum()


def hashed(sums: torch.Tensor) -> str:
    """The digest that sums of rows come to: 32 hexadecimal digits."""
    return digest_of(sums.numpy())


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor on the CPU: its memory, wherever it begins, while the tensor has it.

    It has a storage of its own: words may be looked at from any byte on, which a view of a larger storage does not
    allow; and the tensor's storage can still be resized, which it cannot be once numpy has seen it.
    """
    if not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError("only contiguous memory of the CPU can be looked at as bytes")
    if not (size := tensor.numel() * tensor.element_size()):
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(tensor.data_ptr()), dtype=torch.uint8)


def digest_of(data: bytes) -> str:
    """The digest of some bytes."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def threads_for(size: int) -> int:
    """How many threads copy so many bytes: one does not use a processor's memory to the full."""
    return min(_MOST_THREADS, len(os.sched_getaffinity(0)), size // _WORTH_A_THREAD + 1)


@contextlib.contextmanager
def in_threads(count: int) -> Iterator[Callable[..., Iterator[Any]]]:
    """A `map` that works in so many threads, each of which computes alone; results in the order of the items."""
    before = torch.get_num_threads()
    try:
        if count == 1:
            torch.set_num_threads(1)  # pieces are too small to be shared out by torch
            yield map
            return
        with ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            yield pool.map
    finally:
        torch.set_num_threads(before)  # what the threads set holds for them alone, and for threads to come
