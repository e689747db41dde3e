"""Checksum of weights that a trainer and an engine compute alike, though they lay the weights out differently.

An engine fuses projections (q, k and v; gate and up), splits them over GPUs, pads the vocabulary with zeros and ties
embeddings. So the checksum is made of sums over elements, which do not depend on how they are arranged: of each
element's bit pattern, and of a hash of it (zero for zero, so padding counts nothing). Sums are kept per *group*,
which is what an engine may fuse, and each group is weighted with a salt made from its name, so that layers cannot
change places unnoticed. Elements that change places within one group are not noticed. Everything is exact integer
arithmetic: the same on every device, and sums of shards simply add up.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from gyre.checksum_groups import MASK, Sums, accumulate, add, combine, differing, group_of

__all__ = ["Sums", "add", "checksum", "combine", "differing", "group_of", "sums", "sums_of"]

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
_CPU_CHUNK = 1 << 17  # elements; the buffers stay in the cache
_GPU_CHUNK = 1 << 23  # elements; the buffers stay small beside a full KV cache


@torch.no_grad()
def sums_of(tensor: torch.Tensor) -> tuple[int, int]:
    """The two sums over one tensor's elements; those of its parts add up to them, modulo 2^64."""
    bits = tensor.detach().contiguous().view(-1).view(_INTEGERS[tensor.element_size()])
    chunk = _CPU_CHUNK if bits.device.type == "cpu" else _GPU_CHUNK
    mixed = torch.empty(min(chunk, bits.numel()), dtype=torch.int32, device=bits.device)
    shifted = torch.empty_like(mixed)
    plain_sum = mixed_sum = 0
    for part in bits.split(chunk):
        m, s = mixed[: part.numel()], shifted[: part.numel()]
        wide = part if part.dtype == torch.int32 else m.copy_(part)
        plain = wide.sum(dtype=torch.int64)
        torch.mul(wide, -1640531527, out=m)  # odd constants of well-known integer hashes, as 32-bit two's complement
        torch.bitwise_right_shift(m, 15, out=s)
        m.bitwise_xor_(s).mul_(-2048144777)
        plain_sum += int(plain)
        mixed_sum += int(m.sum(dtype=torch.int64))
    return plain_sum & MASK, mixed_sum & MASK


@torch.no_grad()
def sums(tensors: Iterable[tuple[str, torch.Tensor]]) -> Sums:
    """The two sums of every group; `tensors` are named weights (or shards of them), tied ones once."""
    total: Sums = {}
    for name, tensor in tensors:
        if tensor.numel():
            accumulate(total, group_of(name), sums_of(tensor))
    return total


def checksum(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Checksum of named weights, under their Hugging Face names or an engine's, tied ones once: 32 hex digits."""
    return combine(sums(tensors))
