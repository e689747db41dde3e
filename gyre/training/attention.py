"""Attention within each of the samples that are packed into one row, as an attention function of transformers.

Samples lie one after the other in one row; where they start comes with every call of the model, as the keyword
arguments that transformers has for this (`cu_seq_lens_q` and so on), so that models which keep other state across
tokens may heed them too. No mask is ever built: transformers makes none for an attention that it has no mask for.

On a GPU and in half precision it is torch's variable-length attention. Elsewhere each sample has a call of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from gyre.errors import GyreError

NAME = "gyre_packed"  # of the attention implementation
#: Keyword arguments of a model's attention that change nothing in what it computes.
_HARMLESS = {
    "cache_position", "cu_seq_lens_k", "logits_to_keep", "max_length_k", "output_attentions", "output_hidden_states",
    "output_router_logits", "position_ids", "return_dict", "use_cache",
}  # fmt: skip


class UnknownAttention(GyreError):
    """A model's attention is more than this one computes."""


def registered() -> str:
    """The name to give as `attn_implementation`; transformers knows it from now on."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, packed_attention)
    return NAME


def use(model: torch.nn.Module) -> bool:
    """Have a model of transformers use this attention; False, and no change, where it cannot be known to do.

    Models that can do with Flash Attention say all that they ask of it in arguments; others may say it in masks.
    """
    config = model.config.get_text_config()
    chunked = "chunked_attention" in (getattr(config, "layer_types", None) or ())
    if chunked or not getattr(model, "_supports_flash_attn", False) or not model._can_set_attn_implementation():
        return False
    model.set_attn_implementation(registered())
    return True


def boundaries(positions: torch.Tensor, starts: torch.Tensor, longest: int) -> dict[str, Any]:
    """What a model's call has to be told: positions int64 [T], starts int32 [k + 1], tokens of the longest sample."""
    return {
        "position_ids": positions[None],
        "cu_seq_lens_q": starts,
        "cu_seq_lens_k": starts,
        "max_length_q": longest,
        "max_length_k": longest,
        "use_cache": False,
    }


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each sample.

    Of query [1, heads, T, D], key and value [1, KV heads, T, D] it makes [1, T, heads, D]. Without
    boundaries the row is one sample, and there may be several rows of the same length.

    Raises:
        UnknownAttention: the model asks for more than that.
    """
    unknown = [name for name, given in others.items() if name not in _HARMLESS and given is not None]
    if attention_mask is not None:
        unknown.append("a mask")
    if is_causal is False or not getattr(module, "is_causal", True):
        unknown.append("attention to later tokens")
    if dropout:
        unknown.append("dropout")
    if unknown:
        raise UnknownAttention(f"the attention of {type(module).__name__} has {', '.join(unknown)}")
    if cu_seq_lens_q is None:
        mixed = _one(query, key, value, scaling, sliding_window)
    elif query.is_cuda and query.dtype in (torch.float16, torch.bfloat16) and query.shape[-1] == value.shape[-1] <= 256:
        return _varlen(query, key, value, scaling, sliding_window, cu_seq_lens_q, max_length_q), None
    else:
        lengths = cu_seq_lens_q.diff().tolist()
        parts = zip(*(tensor.split(lengths, dim=2) for tensor in (query, key, value)), strict=True)
        mixed = torch.cat([_one(q, k, v, scaling, sliding_window) for q, k, v in parts], dim=2)
    return mixed.transpose(1, 2).contiguous(), None


def _one(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None, window: int | None
) -> torch.Tensor:
    """Samples of one length, each of them a row: [n, heads, L, D]."""
    grouped = query.shape[1] != key.shape[1]
    length = query.shape[2]
    if window is None or length <= window:
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=grouped)
    outputs = []
    for begin in range(0, length, window):  # a block of queries sees itself and the window before it
        end, first = min(begin + window, length), max(0, begin - window + 1)
        own = torch.arange(begin, end, device=query.device)[:, None]
        seen = torch.arange(first, end, device=query.device)
        mask = (seen <= own) & (seen > own - window)
        block = (query[:, :, begin:end], key[:, :, first:end], value[:, :, first:end])
        outputs.append(scaled_dot_product_attention(*block, attn_mask=mask, scale=scale, enable_gqa=grouped))
    return torch.cat(outputs, dim=2)


def _varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float | None,
    window: int | None,
    starts: torch.Tensor,
    longest: int | None,
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    longest = longest or int(starts.diff().max())
    flat = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
    mixed = varlen_attn(
        *flat,
        starts,
        starts,
        longest,
        longest,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return mixed[None]
