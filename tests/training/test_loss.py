"""The loss against its formula, and scoring against whole logits."""

import numpy as np
import pytest
import torch

from gyre.training.batch import Batch
from gyre.training.loss import clipped_ratio_loss, micro_step_loss
from gyre.training.packing import Row, lay_out
from gyre.training.scorer import Scorer
from gyre.training.statistics import Statistics
from tests.training.cells import VOCABULARY, make_sample


def test_the_loss_is_the_clipped_ratio_summed():
    ratio = torch.tensor([0.5, 0.9, 1.1, 1.5, 0.5, 1.5])
    advantages = torch.tensor([1.0, 1.0, 1.0, 1.0, -1.0, -2.0])
    weights = torch.tensor([1.0, 1.0, 2.0, 1.0, 1.0, 1.0])
    current = ratio.log().requires_grad_()
    loss, statistics = clipped_ratio_loss(current, torch.zeros(6), advantages, weights, clip=0.2)
    assert loss.item() == pytest.approx(-(0.5 + 0.9 + 2 * 1.1 + 1.2 - 0.8 - 2 * 1.5))
    loss.backward()
    # no gradient where clipping makes the objective flat: 1.5 with a good, 0.5 with a bad advantage
    assert torch.allclose(current.grad, torch.tensor([-0.5, -0.9, -2.2, 0.0, 0.0, 3.0]))
    assert (statistics.tokens, statistics.weight, statistics.clipped) == (6, 7, 2)
    assert statistics.ratio == pytest.approx(6.0)
    assert statistics.kl == pytest.approx(float((ratio - 1 - ratio.log()).sum()), rel=1e-5)


def test_a_wild_ratio_stays_finite():
    current = torch.tensor([0.0]).requires_grad_()
    loss, _ = clipped_ratio_loss(current, torch.tensor([-500.0]), torch.tensor([-1.0]), torch.ones(1), 0.2)
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(current.grad).all()


def test_statistics_add_up():
    total = Statistics(loss=1.0, tokens=2.0)
    total.add(Statistics(loss=0.5, entropy=3.0))
    assert (total.loss, total.tokens, total.entropy) == (1.5, 2.0, 3.0)


def tiny(kind: str) -> torch.nn.Module:
    import transformers

    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.3,
    }
    if kind == "Granite":
        shape["logits_scaling"] = 4.0
    torch.manual_seed(1)
    return getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**shape)).eval()


@pytest.mark.parametrize(("kind", "whole"), [("Llama", False), ("Granite", True)])
def test_scores_are_those_of_the_whole_model(kind, whole):
    """Also for a model whose logits are more than a projection; packing changes nothing."""
    model = tiny(kind)
    scorer = Scorer(model)
    scorer.check()
    assert scorer.whole == whole
    samples = [make_sample(n, 0) for n in (1, 2, 3)]
    batch = Batch.of(lay_out(1, [Row(sample, 1.0) for sample in samples]), "cpu")
    current, entropy = scorer(batch)
    expected, disorder = [], []
    with torch.no_grad():
        for sample in samples:
            tokens = torch.from_numpy(sample.tokens).long()
            logits = model(input_ids=tokens[None]).logits[0].double()
            for place in np.flatnonzero(sample.trained):
                spread = torch.log_softmax(logits[place - 1] / float(sample.temperatures[place]), -1)
                expected.append(float(spread[tokens[place]]))
                disorder.append(float(-(spread.exp() * spread).sum()))
    assert np.allclose(current.detach(), expected, atol=1e-5)
    assert np.allclose(entropy, disorder, atol=1e-4)
    loss, statistics = micro_step_loss(scorer, batch, 0.2)
    assert loss.requires_grad and statistics.entropy == pytest.approx(sum(disorder), rel=1e-4)
