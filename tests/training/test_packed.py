"""Packed samples against each sample alone: the same log-probabilities and gradients, whatever lies beside them."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers

from gyre.training import attention, scorer
from gyre.training.batch import Batch
from gyre.training.packing import MicroStep, blank
from gyre.training.scorer import Scorer

VOCABULARY = 96
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
}
WINDOW = 6
KINDS = {
    "Llama": {"num_key_value_heads": 4},
    "Qwen2": {},
    "Qwen3": {"head_dim": 16, "tie_word_embeddings": True},
    "Mistral": {"sliding_window": WINDOW},
}
LENGTHS = {"one": [23], "shortest": [2, 2, 2], "equal": [9, 9, 9, 9], "mixed": [17, 2, 40, 5, 17, 3]}


def make(kind: str, **more) -> torch.nn.Module:
    torch.manual_seed(1)
    config = getattr(transformers, f"{kind}Config")(**SHAPE | more)
    return getattr(transformers, f"{kind}ForCausalLM")._from_config(config, attn_implementation="eager")


def step_of(lengths: list[int], seed: int = 0) -> MicroStep:
    """Random samples of some lengths; the last token of each is trained, and half of the others."""
    random = np.random.default_rng(seed)
    starts = np.cumsum([0, *lengths]).astype(np.int32)
    trained = random.random(starts[-1]) < 0.5
    trained[starts[:-1]], trained[starts[1:] - 1] = False, True
    place = np.flatnonzero(trained).astype(np.int32)
    tokens = random.integers(0, VOCABULARY, starts[-1]).astype(np.int32)
    floats = [random.uniform(0.5, 1.5, len(place)).astype(np.float32) for _ in range(4)]
    return MicroStep(1, tokens, starts, place, *floats)


def alone(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Log-probabilities of the trained tokens from whole logits, one sample at a time."""
    starts, found = batch.starts.tolist(), []
    for begin, end in zip(starts, starts[1:], strict=False):
        logits = model(input_ids=batch.tokens[None, begin:end]).logits[0].float()
        own = (batch.place >= begin) & (batch.place < end)
        place = batch.place[own]
        spread = torch.log_softmax(logits[place - 1 - begin] / batch.temperatures[own, None], -1)
        found.append(spread.gather(1, batch.tokens[place][:, None])[:, 0])
    return torch.cat(found)


def gradients(model: torch.nn.Module, current: torch.Tensor, batch: Batch) -> dict[str, torch.Tensor]:
    model.zero_grad()
    (current * batch.weights).sum().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def distance(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Largest difference of two gradients, as a fraction of the largest element of its parameter.

    Or of a tenth of all parameters' largest: the query of a first token has no gradient but rounding.
    """
    assert found.keys() == expected.keys()
    floor = max(float(one.abs().max()) for one in expected.values()) / 10
    return max(float((found[n] - expected[n]).abs().max()) / max(floor, float(expected[n].abs().max())) for n in found)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_each_sample_alone(kind, lengths):
    model = make(kind, **KINDS[kind])
    batch = Batch.of(step_of(lengths), "cpu")
    expected = alone(model, batch)
    wanted = gradients(model, expected, batch)
    packed = Scorer(model)
    packed.check()
    assert (packed.apart, packed.whole, model.config._attn_implementation) == (False, False, attention.NAME)
    current, _ = packed(batch)
    assert torch.allclose(current, expected, atol=1e-5)
    assert distance(gradients(model, current, batch), wanted) < 1e-5


def test_attention_across_boundaries_would_be_seen():
    """The comparison above can fail: with one sample's boundaries left out it is far off."""
    model = make("Llama")
    batch = Batch.of(step_of(LENGTHS["mixed"]), "cpu")
    expected = alone(model, batch)
    wanted = gradients(model, expected, batch)
    joined = replace(batch, starts=torch.cat([batch.starts[:1], batch.starts[2:]]))
    current, _ = Scorer(model)(joined)
    assert float((current - expected).detach().abs().max()) > 0.1
    assert distance(gradients(model, current, batch), wanted) > 0.1


def test_a_window_is_of_so_many_tokens():
    """The last token's output depends on the tokens in its window, itself one of them, and on no other."""
    heads = torch.randn(3, 1, 2, 20, 8, dtype=torch.float64, requires_grad=True)
    module = torch.nn.Module()
    mixed, _ = attention.packed_attention(module, *heads, None, sliding_window=WINDOW)
    mixed[0, -1].sum().backward()
    seen = heads.grad[2].abs().sum(dim=(0, 1, 3)).nonzero().flatten().tolist()
    assert seen == list(range(20 - WINDOW, 20))


def documented_varlen(query, key, value, starts, _, longest, __, *, scale, window_size, enable_gqa):
    """What torch's documentation says of its variable-length attention, by a mask over everything."""
    assert enable_gqa == (query.shape[1] != key.shape[1]) and longest == int(starts.diff().max())
    place = torch.arange(len(query))
    sample = torch.searchsorted(starts.long(), place, right=True)
    ahead = place[None] - place[:, None]
    left, right = window_size
    seen = (sample[:, None] == sample) & (ahead <= right) & ((left < 0) | (-ahead <= left))
    key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], 1) for tensor in (key, value))
    weights = torch.einsum("qhd,khd->hqk", query, key) * scale
    return torch.einsum("hqk,khd->qhd", weights.masked_fill(~seen, -torch.inf).softmax(-1), value)


@pytest.mark.parametrize("window", [None, WINDOW])
def test_variable_length_attention_is_asked_for_the_same(monkeypatch, window):
    """It runs on GPUs alone; here its documentation does in its place."""
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", documented_varlen)
    starts = Batch.of(step_of(LENGTHS["mixed"]), "cpu").starts
    query, key, value = (torch.randn(1, heads, int(starts[-1]), 8, dtype=torch.float64) for heads in (4, 2, 2))
    told = {"scaling": 0.3, "sliding_window": window, "cu_seq_lens_q": starts, "max_length_q": max(LENGTHS["mixed"])}
    one, _ = attention.packed_attention(torch.nn.Module(), query, key, value, None, **told)
    other = attention._varlen(query, key, value, 0.3, window, starts, max(LENGTHS["mixed"]))
    assert torch.allclose(one, other)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_on_a_gpu(kind):
    """In half precision, packed by variable-length attention: as near to float32 as each sample alone is."""
    batch = Batch.of(step_of(LENGTHS["mixed"]), "cuda")
    model = make(kind, **KINDS[kind]).cuda()
    exact = gradients(model, alone(model, batch), batch)
    low = make(kind, **KINDS[kind]).to("cuda", torch.bfloat16)
    expected = relative(gradients(low, alone(low, batch), batch), exact)
    packed = Scorer(low)
    packed.check()
    assert not packed.apart
    assert relative(gradients(low, packed(batch)[0], batch), exact) < 3 * expected < 0.6


def relative(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The norm of two gradients' difference, as a fraction of the second one's norm."""
    squares = [(float((found[n].float() - e).square().sum()), float(e.square().sum())) for n, e in expected.items()]
    return (sum(one for one, _ in squares) / sum(other for _, other in squares)) ** 0.5


def test_logits_made_piece_by_piece_are_the_same(monkeypatch):
    model = make("Qwen3", **KINDS["Qwen3"])
    batch = Batch.of(step_of(LENGTHS["mixed"]), "cpu")
    packed = Scorer(model)
    once = packed(batch)
    wanted = gradients(model, once[0], batch)
    monkeypatch.setattr(scorer, "_LOGITS_BYTES", 4 * VOCABULARY * 7)
    monkeypatch.setattr(scorer, "_BLOCK_BYTES", 4 * VOCABULARY * 3)
    pieces = packed(batch)
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(once, pieces, strict=True))
    assert distance(gradients(model, pieces[0], batch), wanted) < 1e-5


def test_activations_computed_twice_give_the_same_gradients():
    model = make("Qwen3", **KINDS["Qwen3"])
    batch = Batch.of(step_of(LENGTHS["mixed"]), "cpu")
    wanted = gradients(model, Scorer(model)(batch)[0], batch)
    calls = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    current, _ = Scorer(model.train(), checkpoint_activations=True)(batch)
    assert distance(gradients(model, current, batch), wanted) < 1e-6
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("kind", "more", "attention_then"),
    [
        # layers that carry a state from token to token, which knows of no boundaries
        ("GraniteMoeHybrid", {"layer_types": ["mamba", "attention"], "mamba_n_heads": 4}, attention.NAME),
        ("Gemma2", {"head_dim": 8, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 8}, "eager"),
    ],
)
def test_a_model_that_cannot_be_packed_is_run_sample_by_sample(kind, more, attention_then):
    model = make(kind, **more)
    batch = Batch.of(step_of(LENGTHS["mixed"]), "cpu")
    expected = alone(model, batch)
    wanted = gradients(model, expected, batch)
    packed = Scorer(model)
    packed.check()
    assert packed.apart and model.config._attn_implementation == attention_then
    current, _ = packed(batch)
    assert torch.allclose(current, expected, atol=1e-5)
    assert distance(gradients(model, current, batch), wanted) < 1e-4


def test_a_blank_micro_step_has_gradients_of_zero():
    model = make("Qwen3", **KINDS["Qwen3"])
    batch = Batch.of(blank(), "cpu")
    current, _ = Scorer(model)(batch)
    assert all(not gradient.any() for gradient in gradients(model, current, batch).values())
