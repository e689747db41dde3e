"""Parked memory is really given back, and comes back as it was, to everybody who held it."""

import torch

from gyre.training.accumulators import Accumulators, Flat, square_sum
from gyre.training.parking import Parked, reachable


def test_storages_return_to_all_their_views():
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    inputs = torch.randn(2, 4)
    model(inputs).sum().backward()
    optimizer.step()
    view = model.weight.data[1:, 2]
    before = [tensor.clone() for tensor in (*model.parameters(), view, model.weight.grad)]
    states = {name: state.clone() for name, state in optimizer.state[model.weight].items()}

    parked = Parked("cpu", model, optimizer)
    assert parked.held > 0
    assert all(p.untyped_storage().nbytes() == 0 for p in model.parameters())
    assert optimizer.state[model.weight]["exp_avg"].untyped_storage().nbytes() == 0
    parked.restore()
    after = [*model.parameters(), view, model.weight.grad]
    assert all(torch.equal(left, right) for left, right in zip(before, after, strict=True))
    for name, state in optimizer.state[model.weight].items():
        assert torch.equal(state, states[name])
    assert parked.held == 0


def test_tensors_are_found_in_objects_containers_and_cycles():
    class Thing:
        pass

    thing = Thing()
    thing.me = thing
    thing.rows = [{"a": (torch.ones(1), {"b"})}, torch.nn.Linear(1, 1)]
    assert len(list(reachable(thing))) == 3


def test_a_released_buffer_holds_nothing():
    flat = Flat([torch.Size([2, 3]), torch.Size([4])], torch.float32, "cpu")
    assert flat.held == 40
    flat.release()
    assert flat.held == 0
    flat.restore()
    flat.data.zero_()
    flat.views[1].fill_(1)
    assert flat.data.sum() == 4 and flat.views[0].shape == (2, 3)


def test_gradients_move_into_their_sums_as_they_appear():
    model = torch.nn.Linear(3, 2).bfloat16()
    accumulators = Accumulators(model.parameters(), "cpu")
    accumulators.hook()
    accumulators.begin()
    for _ in range(3):
        model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
    assert model.weight.grad is None
    assert accumulators.flat.data.dtype == torch.float32
    assert (accumulators.flat.data == 3).all()
    assert square_sum(accumulators.flat.data) == 8 * 9
