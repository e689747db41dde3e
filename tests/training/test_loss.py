"""Scoring against whole logits."""

import numpy as np
import pytest
import torch

from gyre.training.batch import Batch
from gyre.training.objectives import Objective, objective_loss
from gyre.training.packing import Row, lay_out
from gyre.training.scorer import Scorer
from tests.training.cells import VOCABULARY, make_config, make_sample


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
    loss, statistics = objective_loss(Objective.of(make_config().train), *scorer(batch), batch)
    assert loss.requires_grad and statistics.entropy == pytest.approx(sum(disorder), rel=1e-4)
