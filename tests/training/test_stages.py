"""A model cut into stages computes what the whole one does, and what cannot be cut is refused."""

import json

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from gyre.errors import UserError
from gyre.training.batch import Batch
from gyre.training.stages import EMBEDDING, load_stage, split
from tests.training.cells import VOCABULARY, make_model
from tests.training.test_packed import step_of

CPU = torch.device("cpu")
EXACT = 1e-6
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
}


# -- where to cut ----------------------------------------------------------------------------------------------------
def test_stages_are_of_about_the_same_size():
    assert split([10] * 8, 0, 0, 2) == [(0, 4), (4, 8)]
    assert split([10] * 8, 20, 20, 2) == [(0, 4), (4, 8)]
    assert split([10] * 8, 20, 0, 2) == [(0, 3), (3, 8)]
    assert split([10] * 8, 0, 40, 3) in ([(0, 3), (3, 7), (7, 8)], [(0, 4), (4, 7), (7, 8)])
    assert split([10] * 3, 1000, 1000, 3) == [(0, 1), (1, 2), (2, 3)]
    assert split([1], 5, 5, 1) == [(0, 1)]


def test_no_cut_is_better():
    """Against all cuts, of layers of various sizes."""
    import itertools
    import random

    def largest(cuts: list[tuple[int, int]]) -> int:
        extra = [first * (b == 0) + last * (e == len(layers)) for b, e in cuts]
        return max(sum(layers[b:e]) + more for (b, e), more in zip(cuts, extra, strict=True))

    draw = random.Random(1)
    for _ in range(100):
        layers = [draw.randint(1, 9) for _ in range(draw.randint(1, 7))]
        first, last, stages = draw.randint(0, 20), draw.randint(0, 20), draw.randint(1, len(layers))
        every = []
        for inner in itertools.combinations(range(1, len(layers)), stages - 1):
            bounds = [0, *inner, len(layers)]
            every.append(list(zip(bounds, bounds[1:], strict=False)))
        found = split(layers, first, last, stages)
        assert found in every
        assert largest(found) == min(map(largest, every))


# -- what a stage computes -------------------------------------------------------------------------------------------
def models(tied: bool) -> dict:
    """Small ones of the types that can be cut, Mistral's with a window that is shorter than samples."""
    options = {**SIZES, "tie_word_embeddings": tied}
    windows = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}  # of the later layers alone
    return {
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**options)),
        "mistral": lambda: MistralForCausalLM(MistralConfig(**options, sliding_window=8)),
        "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**options, **windows)),
        "qwen3": None,
    }


def save(directory, kind: str, tied: bool):
    torch.manual_seed(1)
    make = models(tied)[kind]
    if make is None:
        return make_model(directory, tied=tied, num_hidden_layers=4)
    make().save_pretrained(directory)
    return directory


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_stages_one_after_the_other_are_the_whole_model(tmp_path, kind, tied):
    directory = save(tmp_path / "model", kind, tied)
    batch = Batch.of(step_of([5, 30, 9]), "cpu")
    whole = load_stage(directory, torch.float32, CPU, True)
    wanted, entropies = whole(batch)
    (wanted * batch.advantages).sum().backward()
    gradients = {name: parameter.grad for name, parameter in whole.weights()}

    for stages in (2, 3):
        cut = [load_stage(directory, torch.float32, CPU, True, stage, stages) for stage in range(stages)]
        names = [[name for name, _ in stage.weights()] for stage in cut]
        assert sum(names, []) == list(gradients), "in the whole model's order, each once"
        sent, received = [], [None]
        for stage in cut[:-1]:
            sent.append(stage(batch, received[-1]))
            received.append(sent[-1].detach().requires_grad_())
        found, spread = cut[-1](batch, received[-1])
        torch.testing.assert_close(found, wanted, rtol=EXACT, atol=EXACT)
        torch.testing.assert_close(spread, entropies, rtol=EXACT, atol=EXACT)

        (found * batch.advantages).sum().backward()
        for output, after in zip(reversed(sent), reversed(received), strict=False):
            output.backward(after.grad)
        own = {name: parameter.grad for stage in cut for name, parameter in stage.weights()}
        assert (cut[-1].tied is not None) == tied
        if tied:
            assert torch.equal(cut[-1].tied, dict(whole.weights())[EMBEDDING])
            assert cut[-1].tied.grad is not None
            own[EMBEDDING] = own[EMBEDDING] + cut[-1].tied.grad
        for name, gradient in gradients.items():
            far = float((own[name] - gradient).abs().max() / gradient.abs().max())
            assert far < EXACT * 10, name  # sums of some hundred products in another order
            assert float((own[name] - gradient).norm() / gradient.norm()) < EXACT, name


def test_a_stage_without_weights_has_the_same_tensors(tmp_path):
    directory = save(tmp_path / "model", "qwen3", True)
    for stage in range(2):
        one, other = (load_stage(directory, torch.float32, CPU, weights, stage, 2) for weights in (True, False))
        assert [(n, p.shape) for n, p in one.weights()] == [(n, p.shape) for n, p in other.weights()]
        assert (one.tied is None) == (other.tied is None)


def test_recomputed_activations_give_the_same_gradients(tmp_path):
    directory = save(tmp_path / "model", "qwen3", False)
    batch = Batch.of(step_of([12, 7]), "cpu")
    found = []
    for recompute in (False, True):
        stage = load_stage(directory, torch.float32, CPU, True, 0, 2, recompute)
        out = stage(batch)
        out.backward(torch.ones_like(out))
        found.append([parameter.grad for _, parameter in stage.weights()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


# -- what is refused -------------------------------------------------------------------------------------------------
def test_more_stages_than_layers_are_refused(tmp_path):
    directory = save(tmp_path / "model", "qwen3", True)
    with pytest.raises(UserError, match=r"^train.stages \(5\) must be at most the model's layers \(4\)$"):
        load_stage(directory, torch.float32, CPU, True, 0, 5)


def test_a_model_of_another_kind_is_refused(tmp_path):
    GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=32)).save_pretrained(tmp_path / "model")
    with pytest.raises(UserError, match=r"^train.stages: a model of type gpt2 cannot be cut .* set train.stages=1$"):
        load_stage(tmp_path / "model", torch.float32, CPU, True, 0, 2)


def test_a_missing_weight_is_named(tmp_path):
    from safetensors.torch import load_file, save_file

    directory = save(tmp_path / "model", "qwen3", False)
    file = directory / "model.safetensors"
    weights = load_file(file)
    del weights["model.norm.weight"]
    save_file(weights, file, {"format": "pt"})
    load_stage(directory, torch.float32, CPU, True, 0, 2)  # has no use for it
    with pytest.raises(UserError, match=r"has no weight model.norm.weight$"):
        load_stage(directory, torch.float32, CPU, True, 1, 2)


def test_a_whole_model_of_any_kind_is_taken(tmp_path):
    GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=32)).save_pretrained(tmp_path / "model")
    assert json.loads((tmp_path / "model/config.json").read_text())["model_type"] == "gpt2"
    stage = load_stage(tmp_path / "model", torch.float32, CPU, True)
    assert stage.first and stage.last and stage.tied is None
