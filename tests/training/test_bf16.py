"""A core in bf16 against DeepSpeed alone, with its own accumulation in fp32, on the same micro-steps.

The micro-steps weigh 1 each and there are eight of them, so that dividing by their number before each backward pass
(DeepSpeed) and by the total weight at the end (ours) are the same to the last bit, as powers of two are in bf16. So one
shard must make the same weights, bit for bit. Two add gradients up in another order; where a sum in fp32 rounds
differently, a weight may round to the next number of bf16 (2^-8 of it), which later gradients then see.
"""

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.training.cells import make_model

UPDATES = 5


@pytest.fixture(scope="module")
def models(one, tmp_path_factory):
    """A model's directory, its weights, and those that plain DeepSpeed made of them."""
    directory = tmp_path_factory.mktemp("bf16")
    model = make_model(directory / "model")
    rounded = {name: tensor.bfloat16().float() for name, tensor in load_file(model / "model.safetensors").items()}
    save_file(rounded, model / "model.safetensors", {"format": "pt"})  # DeepSpeed alone knows no other digits
    one.do("plain", model=str(model), file=str(directory / "plain"), updates=UPDATES)
    return model, rounded, load_file(directory / "plain")


def far(found: dict, wanted: dict, start: dict) -> float:
    """How far apart two ways lead, as a fraction of how far they go."""
    apart = sum(float((found[name] - wanted[name]).double().square().sum()) for name in wanted)
    moved = sum(float((wanted[name] - start[name]).double().square().sum()) for name in wanted)
    return (apart / moved) ** 0.5


@pytest.mark.parametrize("zero_stage", [2, 3])
@pytest.mark.parametrize("shards", [1, 2])
def test_it_goes_where_plain_deepspeed_goes(one, two, models, tmp_path, shards, zero_stage):
    model, start, plain = models
    world = one if shards == 1 else two
    world.do("build", model=str(model), dtype="bfloat16", train={"zero_stage": zero_stage})
    world.do("train", first=1, last=UPDATES, even=True, clip=1e9)
    world.do("masters", file=str(tmp_path / "masters"))
    found = load_file(tmp_path / "masters")
    distance = far(found, plain, start)
    print(f"shards {shards}, ZeRO {zero_stage}: {distance:.1e} of the way")
    assert all(tensor.dtype == torch.float32 for tensor in found.values())
    assert distance <= (0 if shards == 1 else 1e-3)
