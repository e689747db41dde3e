"""Checksum of weights that a trainer and an engine compute alike, though they lay the weights out differently.

An engine fuses projections (q, k and v; gate and up), splits them over GPUs, pads the vocabulary with zeros and ties
embeddings. So the checksum is made of sums over elements, which do not depend on how they are arranged: of each
element's bit pattern, and of a hash of it (zero for zero, so padding counts nothing). Sums are kept per *group*,
which is what an engine may fuse, and each group is weighted with a salt made from its name, so that layers cannot
change places unnoticed. Elements that change places within one group are not noticed. Everything is exact integer
arithmetic: the same on every device, and sums of shards simply add up.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping

import torch

Sums = dict[str, tuple[int, int]]

_FUSED = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "qkv_proj": "qkv"}
_FUSED |= {"gate_proj": "gate_up", "up_proj": "gate_up", "gate_up_proj": "gate_up"}
_FUSED |= {"embed_tokens": "vocabulary", "lm_head": "vocabulary"}  # tied embeddings go by either name
_EXPERTS = {"w13_weight": "gate_up", "gate_up_proj": "gate_up", "gate_proj": "gate_up", "up_proj": "gate_up"}
_EXPERTS |= {"w2_weight": "down", "down_proj": "down"}
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
_CPU_CHUNK = 1 << 16  # elements; the buffers stay in the cache
_GPU_CHUNK = 1 << 23  # elements; the buffers stay small beside a full KV cache
_MASK = (1 << 64) - 1


def group_of(name: str) -> str:
    """The group that a parameter counts in: its layer and what it would be fused with."""
    before, experts, after = name.partition(".experts.")
    if experts:  # one tensor for each expert and projection, or stacked ones
        projection = next((group for part, group in _EXPERTS.items() if part in after.split(".")), after)
        return f"{'.'.join(re.findall(r'[0-9]+', before))}:experts.{projection}"
    *parents, module, kind = ("", *name.split("."))
    layer = ".".join(re.findall(r"\d+", ".".join(parents)))
    return f"{layer}:{_FUSED.get(module, module)}.{kind}"


def _sums(tensor: torch.Tensor) -> tuple[int, int]:
    bits = tensor.detach().contiguous().view(-1).view(_INTEGERS[tensor.element_size()])
    chunk = _CPU_CHUNK if bits.device.type == "cpu" else _GPU_CHUNK
    mixed = torch.empty(min(chunk, bits.numel()), dtype=torch.int32, device=bits.device)
    shifted = torch.empty_like(mixed)
    plain_sum = mixed_sum = 0
    for part in bits.split(chunk):
        m, s = mixed[: part.numel()], shifted[: part.numel()]
        m.copy_(part)
        plain = m.sum(dtype=torch.int64)
        m.mul_(-1640531527)  # odd constants of well-known integer hashes, as 32-bit two's complement
        torch.bitwise_right_shift(m, 15, out=s)
        m.bitwise_xor_(s).mul_(-2048144777)
        plain_sum += int(plain)
        mixed_sum += int(m.sum(dtype=torch.int64))
    return plain_sum & _MASK, mixed_sum & _MASK


@torch.no_grad()
def sums(tensors: Iterable[tuple[str, torch.Tensor]]) -> Sums:
    """The two sums of every group; `tensors` are named weights (or shards of them), tied ones once."""
    total: Sums = {}
    for name, tensor in tensors:
        if tensor.numel():
            _accumulate(total, group_of(name), _sums(tensor))
    return total


def _accumulate(total: Sums, group: str, pair: tuple[int, int]) -> None:
    old = total.get(group, (0, 0))
    total[group] = ((old[0] + pair[0]) & _MASK, (old[1] + pair[1]) & _MASK)


def add(left: Mapping[str, tuple[int, int]], right: Mapping[str, tuple[int, int]]) -> Sums:
    """Sums of the two sets of tensors together."""
    total = dict(left)
    for group, pair in right.items():
        _accumulate(total, group, pair)
    return total


def combine(group_sums: Mapping[str, tuple[int, int]]) -> str:
    """One word for all groups: 32 hexadecimal digits."""
    plain_total = mixed_total = 0
    for group, (plain, mixed) in group_sums.items():
        digest = hashlib.sha256(group.encode()).digest()
        plain_total += plain * (int.from_bytes(digest[:8]) | 1)
        mixed_total += mixed * (int.from_bytes(digest[8:16]) | 1)
    return f"{plain_total & _MASK:016x}{mixed_total & _MASK:016x}"


def differing(left: Mapping[str, tuple[int, int]], right: Mapping[str, tuple[int, int]]) -> list[str]:
    """Groups whose sums differ, in the order of `left`; a group that is missing counts as zeros."""
    groups = dict.fromkeys([*left, *right])
    return [group for group in groups if left.get(group, (0, 0)) != right.get(group, (0, 0))]


def checksum(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Checksum of named weights, under their Hugging Face names or an engine's, tied ones once: 32 hex digits."""
    return combine(sums(tensors))
