"""The file of a snapshot: safetensors, with a digest of each tensor (`gyre.training.digest`) in its metadata."""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from gyre.errors import WeightsMismatch

PIECE = 1 << 20  # bytes that are looked at together: they stay in the cache
_DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
}
_TYPES = {name: dtype for dtype, name in _DTYPES.items()}


@dataclass(frozen=True)
class Spec:
    """Name, type and shape of one tensor of a snapshot."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Size in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def make_header(specs: Iterable[Spec], metadata: dict[str, str]) -> bytes:
    """The header of a file with these tensors, one after the other, and these words about it."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    offset = 0
    for spec in specs:
        end = offset + spec.bytes
        table[spec.name] = {"dtype": _DTYPES[spec.dtype], "shape": list(spec.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_header(descriptor: int) -> bytes:
    """The header of a file: its length and its table.

    Raises:
        WeightsMismatch: it is not a whole snapshot.
    """
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    if not 0 < length < 1 << 28 or len(header := os.pread(descriptor, 8 + length, 0)) != 8 + length:
        raise WeightsMismatch("not a snapshot")
    return header


def metadata_of(header: bytes) -> dict[str, str]:
    """What a header says of its snapshot.

    Raises:
        WeightsMismatch: it is not a header.
    """
    return _table(header).get("__metadata__", {})


def _table(header: bytes) -> dict[str, Any]:
    try:
        return json.loads(header[8:])
    except ValueError as error:
        raise WeightsMismatch("not a snapshot") from error


@dataclass(frozen=True)
class Place:
    """Where a tensor lies in a file: its bytes from `begin` to `end`; the digest is of these bytes."""

    spec: Spec
    begin: int
    end: int
    digest: str


def places_of(header: bytes) -> dict[str, Place]:
    """The tensors of a file, in its order."""
    table = _table(header)
    digests = table.pop("__metadata__")["digests"]
    places = {}
    for index, (name, entry) in enumerate(table.items()):
        begin, end = (len(header) + offset for offset in entry["data_offsets"])
        spec = Spec(name, _TYPES[entry["dtype"]], tuple(entry["shape"]))
        places[name] = Place(spec, begin, end, digests[32 * index : 32 * index + 32])
    return places


def mapped(descriptor: int) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a file, in a private mapping."""
    memory = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
    for name, place in places_of(read_header(descriptor)).items():
        count = torch.Size(place.spec.shape).numel()
        if count:
            flat = torch.frombuffer(memory, dtype=place.spec.dtype, count=count, offset=place.begin)
        else:
            flat = torch.empty(0, dtype=place.spec.dtype)
        yield name, flat.view(place.spec.shape)


def pwrite(descriptor: int, data: memoryview, offset: int) -> None:
    """Write all of some bytes at a place of a file."""
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written
