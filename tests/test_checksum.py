"""The weights' checksum does not see the layout and does see every change of a value."""

import pytest
import torch

from gyre.checksum import checksum, differing, group_of, sums


def weights(dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    shapes = {
        "model.embed_tokens.weight": (70, 16),
        "model.layers.0.self_attn.q_proj.weight": (32, 16),
        "model.layers.0.self_attn.k_proj.weight": (8, 16),
        "model.layers.0.self_attn.v_proj.weight": (8, 16),
        "model.layers.0.mlp.gate_proj.weight": (24, 16),
        "model.layers.0.mlp.up_proj.weight": (24, 16),
        "model.layers.1.mlp.gate_proj.weight": (24, 16),
        "model.norm.weight": (16,),
    }
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_fusing_sharding_padding_and_names_of_tied_weights_do_not_matter(dtype):
    w = weights(dtype)
    attention, mlp = "model.layers.0.self_attn.", "model.layers.0.mlp."
    fused = {
        "lm_head.weight": torch.cat([w["model.embed_tokens.weight"], torch.zeros(58, 16, dtype=dtype)]),
        attention + "qkv_proj.weight": torch.cat([w[f"{attention}{x}_proj.weight"] for x in "qkv"]),
        mlp + "gate_up_proj.weight": torch.cat([w[mlp + "gate_proj.weight"], w[mlp + "up_proj.weight"]]),
        "model.layers.1.mlp.gate_up_proj.weight": w["model.layers.1.mlp.gate_proj.weight"].t(),
        "model.norm.weight": w["model.norm.weight"],
    }
    assert checksum(fused.items()) == checksum(w.items())
    halves = [(name, half) for name, t in fused.items() for half in t.chunk(2)]
    assert checksum(halves) == checksum(w.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_smallest_change_and_swapped_layers_are_seen(dtype):
    w = weights(dtype)
    expected = checksum(w.items())
    for name in w:
        changed = {**w, name: w[name].clone()}
        flat = changed[name].view(-1).view(torch.int32 if dtype == torch.float32 else torch.int16)
        flat[3] ^= 1
        assert checksum(changed.items()) != expected
        assert differing(sums(w.items()), sums(changed.items())) == [group_of(name)]
    a, b = "model.layers.0.mlp.gate_proj.weight", "model.layers.1.mlp.gate_proj.weight"
    assert checksum({**w, a: w[b], b: w[a]}.items()) != expected
    assert checksum([(n, t) for n, t in w.items() if n != "model.norm.weight"]) != expected
    two = {**w, a: w[a].clone()}
    two[a].view(-1)[:2] += torch.tensor([1.0, -1.0], dtype=dtype)  # a plain sum of values would miss this
    assert checksum(two.items()) != expected


def test_experts_may_be_stacked():
    e = torch.randn(4, 2, 8, 16, generator=torch.Generator().manual_seed(2))
    prefix = "model.layers.3.mlp.experts."
    single = [(f"{prefix}{i}.{('gate', 'up')[j]}_proj.weight", e[i, j]) for i in range(4) for j in range(2)]
    for name in ("gate_up_proj", "w13_weight"):
        assert checksum([(prefix + name, e.flatten(1, 2))]) == checksum(single)
    assert checksum([(prefix.replace("3", "4") + "w13_weight", e.flatten(1, 2))]) != checksum(single)
