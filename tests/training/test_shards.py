"""Two shards of a stage, as two processes: sums, steps, checkpoints and weights are those of one process."""

import pytest
import torch
from safetensors.torch import load_file

from gyre.training.batch import Batch
from gyre.training.objectives import Objective, objective_loss
from gyre.training.stages import load_stage
from gyre.training.statistics import Statistics
from tests.training.cells import make_config, make_model
from tests.training.shards_program import CLIP, LR, UPDATES, micro_steps

EXACT = 1e-5


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Of odd sizes, so that shards have padding."""
    return make_model(tmp_path_factory.mktemp("model") / "model", hidden_size=45, intermediate_size=93)


@pytest.fixture(scope="module")
def expected(model):
    return reference(model, make_config().train)


def reference(model, config):
    """Weights and norms of five updates in plain torch, one process, and its KL divergences from the first weights."""
    stage, initial = (load_stage(model, torch.float32, torch.device("cpu"), True) for _ in range(2))
    optimizer = torch.optim.AdamW(stage.parameters(), LR, config.betas, weight_decay=config.weight_decay)
    norms, divergences = [], []
    for update in range(1, UPDATES + 1):
        optimizer.zero_grad()
        total = Statistics()
        for step in micro_steps(update):
            batch = Batch.of(step, "cpu")
            with torch.no_grad():
                before, _ = initial(batch)
            loss, statistics = objective_loss(Objective.of(config), *stage(batch), batch, before)
            loss.backward()
            total.add(statistics)
        for parameter in stage.parameters():
            parameter.grad.div_(total.weight)
        norms.append(float(torch.nn.utils.clip_grad_norm_(stage.parameters(), CLIP)))
        divergences.append(total.kl_reference)
        optimizer.step()
    return {name: parameter.detach() for name, parameter in stage.weights()}, norms, divergences


def distance(found: dict, wanted: dict) -> float:
    assert found.keys() == wanted.keys()
    return max(float((found[name].float() - wanted[name].float()).abs().max()) for name in wanted)


@pytest.mark.parametrize("bucket_bytes", [1, 40, 1 << 20])
def test_sums_of_shards_are_exact_whatever_comes_when(two, bucket_bytes):
    for seed in range(10):
        for answer in two.do("accumulate", seed=seed, bucket_bytes=bucket_bytes):
            assert answer == {"wrong": 0, "squares": True, "aside": True}


CASES = [
    pytest.param({"zero_stage": 2}, id="zero 2", marks=pytest.mark.full),
    pytest.param({"zero_stage": 3}, id="zero 3"),
    pytest.param({"zero_stage": 2, "offload_optimizer": True}, id="zero 2, offload"),
    pytest.param({"zero_stage": 3, "offload_optimizer": True}, id="zero 3, offload", marks=pytest.mark.full),
]


@pytest.mark.parametrize("train", CASES)
def test_updates_are_those_of_one_process_and_go_on_from_a_checkpoint(two, model, expected, tmp_path, train):
    two.do("build", model=str(model), dtype="float32", train=train)
    norms = two.do("train", first=1, last=3)[0]["norms"]
    two.do("save", directory=str(tmp_path), tag="v1")
    norms += two.do("train", first=4, last=UPDATES)[0]["norms"]
    two.do("weights", file=str(tmp_path / "whole"))
    whole = load_file(tmp_path / "whole")
    assert norms == pytest.approx(expected[1], rel=EXACT)
    assert distance(whole, expected[0]) < EXACT

    two.do("build", model=str(model), dtype="float32", train=train)
    two.do("restore", directory=str(tmp_path), tag="v1")
    assert two.do("train", first=4, last=UPDATES)[0]["norms"] == norms[3:]
    two.do("weights", file=str(tmp_path / "again"))
    again = load_file(tmp_path / "again")
    assert all(torch.equal(again[name], whole[name]) for name in whole)


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_a_satellite_computes_the_core_s_sums(two, model, zero_stage):
    train = {"zero_stage": zero_stage}
    two.do("build", model=str(model), dtype="float32", train=train)
    answers = two.do("satellite", model=str(model), train=train)
    for answer in answers:
        assert not answer["wrong"]
        assert answer["difference"] <= 1e-6 * answer["size"]
        assert not any(answer["parked"].values())
    size = 4 * sum(t.numel() for t in load_file(model / "model.safetensors").values())
    weights = sum(answer["held"]["weights"] for answer in answers)
    assert size <= weights <= size * (1.1 if zero_stage == 3 else 2.1)
    assert size <= sum(answer["held"]["accumulators"] for answer in answers) <= 1.1 * size


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_micro_steps_may_be_in_flight(two, model, zero_stage):
    train = {"zero_stage": zero_stage}
    two.do("build", model=str(model), dtype="float32", train=train)
    for answer in two.do("overlapped", model=str(model), train=train):
        assert (answer.pop("whole") == 0) == (zero_stage == 3), "ZeRO-3 has nothing whole between uses"
        assert max(answer.values()) == 0


@pytest.mark.parametrize(
    ("tied", "train"),
    [
        pytest.param(False, {"zero_stage": 3}, id="zero 3, untied"),
        pytest.param(True, {"zero_stage": 3, "checkpoint_activations": True}, id="zero 3, checkpoints"),
        pytest.param(False, {"zero_stage": 2}, id="zero 2, untied", marks=pytest.mark.full),
        pytest.param(False, {"zero_stage": 3, "kl": 1e-3}, id="zero 3, reference", marks=pytest.mark.full),
    ],
)
def test_shards_may_need_logits_in_different_numbers_of_pieces(two, tmp_path, tied, train):
    """With ZeRO-3 all of them gather weights at each call, so that shards which call more often would wait for ever."""
    model = make_model(tmp_path / "model", tied=tied, hidden_size=45, intermediate_size=93)
    two.do("build", model=str(model), dtype="float32", train=train)
    for rows in (1, 7, 1000):
        for answer in two.do("in_pieces", model=str(model), train=train, rows=rows):
            assert max(answer.values()) <= 1e-6, (rows, answer)


def test_the_reference_stays_what_the_model_was(two, model, tmp_path):
    train = {"kl": 0.5}
    weights, norms, divergences = reference(model, make_config(**train).train)
    two.do("build", model=str(model), dtype="float32", train=train)
    found = two.do("train", first=1, last=UPDATES)[0]
    two.do("weights", file=str(tmp_path / "weights"))
    assert divergences[0] == 0 and divergences[-1] > 1e-4
    assert found["divergences"] == pytest.approx(divergences, rel=1e-3)
    assert found["norms"] == pytest.approx(norms, rel=EXACT)
    assert distance(load_file(tmp_path / "weights"), weights) < EXACT


@pytest.mark.parametrize("zero_stage", [2, pytest.param(3, marks=pytest.mark.full)])
def test_parked_memory_is_the_system_s(two, tmp_path, zero_stage):
    """Of a model that outweighs what comes and goes otherwise; the sum of a suspended update stays."""
    model = make_model(tmp_path / "model", hidden_size=512, intermediate_size=2048)
    for answer in two.do("resident", model=str(model), zero_stage=zero_stage):
        print(zero_stage, answer)
        assert answer["satellite"]["given"] > 0.9 * answer["satellite"]["held"]
        assert answer["core False"]["given"] > 0.9 * answer["core False"]["held"] > 0
        assert answer["core True"]["given"] >= -(1 << 20)
