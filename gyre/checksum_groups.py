"""How the checksum of weights (`gyre.checksum`) is put together from sums over elements. Pure.

Sums are kept per *group*, which is what an engine may fuse; each group is weighted with a salt made from its name.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping

Sums = dict[str, tuple[int, int]]

_FUSED = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "qkv_proj": "qkv"}
_FUSED |= {"gate_proj": "gate_up", "up_proj": "gate_up", "gate_up_proj": "gate_up"}
_FUSED |= {"embed_tokens": "vocabulary", "lm_head": "vocabulary"}  # tied embeddings go by either name
_EXPERTS = {"w13_weight": "gate_up", "gate_up_proj": "gate_up", "gate_proj": "gate_up", "up_proj": "gate_up"}
_EXPERTS |= {"w2_weight": "down", "down_proj": "down"}
MASK = (1 << 64) - 1


def group_of(name: str) -> str:
    """The group that a parameter counts in: its layer and what it would be fused with."""
    before, experts, after = name.partition(".experts.")
    if experts:  # one tensor for each expert and projection, or stacked ones
        projection = next((group for part, group in _EXPERTS.items() if part in after.split(".")), after)
        return f"{'.'.join(re.findall(r'[0-9]+', before))}:experts.{projection}"
    *parents, module, kind = ("", *name.split("."))
    layer = ".".join(re.findall(r"\d+", ".".join(parents)))
    return f"{layer}:{_FUSED.get(module, module)}.{kind}"


def accumulate(total: Sums, group: str, pair: tuple[int, int]) -> None:
    """Count the two sums of one tensor towards its group."""
    old = total.get(group, (0, 0))
    total[group] = ((old[0] + pair[0]) & MASK, (old[1] + pair[1]) & MASK)


def add(left: Mapping[str, tuple[int, int]], right: Mapping[str, tuple[int, int]]) -> Sums:
    """Sums of the two sets of tensors together."""
    total = dict(left)
    for group, pair in right.items():
        accumulate(total, group, pair)
    return total


def combine(group_sums: Mapping[str, tuple[int, int]]) -> str:
    """One word for all groups: 32 hexadecimal digits."""
    plain_total = mixed_total = 0
    for group, (plain, mixed) in group_sums.items():
        digest = hashlib.sha256(group.encode()).digest()
        plain_total += plain * (int.from_bytes(digest[:8]) | 1)
        mixed_total += mixed * (int.from_bytes(digest[8:16]) | 1)
    return f"{plain_total & MASK:016x}{mixed_total & MASK:016x}"


def differing(left: Mapping[str, tuple[int, int]], right: Mapping[str, tuple[int, int]]) -> list[str]:
    """Groups whose sums differ, in the order of `left`; a group that is missing counts as zeros."""
    groups = dict.fromkeys([*left, *right])
    return [group for group in groups if left.get(group, (0, 0)) != right.get(group, (0, 0))]
