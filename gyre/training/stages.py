"""A causal language model cut into pipeline stages: the first embeds, each runs some of the layers, the last scores.

A stage is a model of transformers with fewer layers, so that layers, rotary positions and masks are transformers' own.
Its parameters are known by the names that they have in the whole model. Where embeddings are tied, the last stage has
a copy of the matrix to make logits with (`Stage.tied`): it is no parameter of the stage, so that no optimizer sees it,
its gradient belongs to the first stage, and its values come from there.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn

from gyre.errors import UserError
from gyre.training.batch import Batch
from gyre.training.scorer import Scorer

EMBEDDING = "model.embed_tokens.weight"  # its name in all of them
#: Model types whose decoder is an embedding, a list of layers that pass one hidden state on, and a norm.
SPLITTABLE = ("llama", "mistral", "qwen2", "qwen3")


def split(layers: Sequence[int], first: int, last: int, stages: int) -> list[tuple[int, int]]:
    """Which layers each stage has, as (begin, end), so that the largest stage is as small as can be.

    `layers` are the sizes of the layers; the first stage has `first` besides, and the last one `last`.

    Raises:
        UserError: there are fewer layers than stages.
    """
    if stages > len(layers):
        raise UserError(f"train.stages ({stages}) must be at most the model's layers ({len(layers)})")
    sums = [0]
    for size in layers:
        sums.append(sums[-1] + size)

    def weight(begin: int, end: int) -> int:
        return sums[end] - sums[begin] + first * (begin == 0) + last * (end == len(layers))

    # best[k][end]: the largest of k stages over the layers before `end`, and where the last of them begins
    best: list[dict[int, tuple[int, int]]] = [{0: (0, 0)}]
    for k in range(1, stages + 1):
        ends = range(k, len(layers) - (stages - k) + 1)
        best.append({e: min((max(best[-1][b][0], weight(b, e)), b) for b in best[-1] if b < e) for e in ends})
    cuts = [len(layers)]
    for k in range(stages, 0, -1):
        cuts.append(best[k][cuts[-1]][1])
    cuts.reverse()
    return list(zip(cuts, cuts[1:], strict=False))


def has_tied_embeddings(directory: Path) -> bool:
    """Whether the model of a directory makes its logits with the matrix that embeds tokens."""
    from transformers import AutoConfig

    return bool(AutoConfig.from_pretrained(directory).tie_word_embeddings)


class TiedHead(nn.Module):
    """Makes logits with a matrix that is no parameter."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.held = [weight]  # in a list, so that torch does not take it for a parameter
        self.out_features = weight.shape[0]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [n, V] of hidden states [n, H]."""
        return nn.functional.linear(hidden, self.held[0])


class Stage(Scorer):
    """One stage of a model, or the whole of it where there is one."""

    def __init__(
        self,
        model: nn.Module,
        checkpoint_activations: bool = False,
        layers: tuple[int, int] | None = None,
        stage: int = 0,
        stages: int = 1,
    ) -> None:
        super().__init__(model, checkpoint_activations)
        self.first, self.last = stage == 0, stage == stages - 1
        self.hidden_size: int = model.config.get_text_config().hidden_size
        self._begin = layers[0] if layers else 0
        head = model.get_output_embeddings()
        self.tied: torch.Tensor | None = head.held[0] if isinstance(head, TiedHead) else None

    def forward(self, batch: Batch, received: torch.Tensor | None = None) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Hidden states [T, H] for the next stage; of the last one, log-probabilities and entropies as `Scorer`'s.

        `received` are the hidden states [T, H] of the stage before.
        """
        if self.first and self.last:
            return super().forward(batch)
        hidden = self.run(batch.tokens if received is None else received, batch)
        return self.score(hidden, batch) if self.last else hidden

    def weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters under the names that they have in the whole model, tied ones once."""
        for name, parameter in self.model.named_parameters():
            yield _renamed(name, self._begin), parameter


def _renamed(name: str, by: int) -> str:
    before, layers, after = name.partition(".layers.")
    number, dot, rest = after.partition(".")
    return f"{before}{layers}{int(number) + by}{dot}{rest}" if layers else name


def load_stage(
    directory: Path,
    dtype: torch.dtype,
    device: torch.device,
    weights: bool,
    stage: int = 0,
    stages: int = 1,
    checkpoint_activations: bool = False,
) -> Stage:
    """A stage of the causal language model of a directory, for training; without `weights` they are undefined.

    Raises:
        UserError: the model cannot be cut like that, or its files lack a weight.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()
    if stages == 1:
        return Stage(_whole(directory, dtype, device, weights), checkpoint_activations)
    model, layers = _cut(directory, dtype, stage, stages)
    built = Stage(model.to(device), checkpoint_activations, layers, stage, stages)
    if built.tied is not None:
        built.tied.data = built.tied.data.to(device)
    if weights:
        wanted: dict[str, torch.Tensor] = dict(built.weights())
        tied = {EMBEDDING: built.tied} if built.tied is not None else {}
        _read(directory, wanted | tied)
    return built


def _whole(directory: Path, dtype: torch.dtype, device: torch.device, weights: bool) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    options = {"dtype": dtype, "attn_implementation": "sdpa"}
    if weights:
        model = AutoModelForCausalLM.from_pretrained(directory, **options)
    else:
        config = AutoConfig.from_pretrained(directory)
        with no_init_weights():
            model = AutoModelForCausalLM.from_config(config, **options)
    model.tie_weights()
    model.train()
    return model.to(device)


def _cut(directory: Path, dtype: torch.dtype, stage: int, stages: int) -> tuple[nn.Module, tuple[int, int]]:
    """A model with the layers of one stage, its weights undefined, and which layers they are."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    config = AutoConfig.from_pretrained(directory)
    if config.model_type not in SPLITTABLE:
        known = ", ".join(SPLITTABLE)
        raise UserError(
            f"train.stages: a model of type {config.model_type} cannot be cut into stages ({known} can); "
            "set train.stages=1"
        )
    begin, end = split(*_sizes(config), stages)[stage]
    tied = config.tie_word_embeddings
    own = copy.deepcopy(config)
    own.num_hidden_layers = end - begin
    own.tie_word_embeddings = False
    if getattr(own, "layer_types", None):
        own.layer_types = own.layer_types[begin:end]
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(own, dtype=dtype, attn_implementation="sdpa")
    decoder = model.get_decoder()
    if stage > 0:
        decoder.embed_tokens = None
    if stage < stages - 1:
        decoder.norm = nn.Identity()
        model.lm_head = None
    elif tied:
        model.lm_head = TiedHead(model.lm_head.weight.detach().requires_grad_())
    model.train()
    return model, (begin, end)


def _sizes(config: object) -> tuple[list[int], int, int]:
    """Elements of each layer, of the embedding, and of what makes logits."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    layers = [sum(p.numel() for p in layer.parameters()) for layer in model.get_decoder().layers]
    return layers, model.get_input_embeddings().weight.numel(), model.get_output_embeddings().weight.numel()


@torch.no_grad()
def _read(directory: Path, wanted: Mapping[str, torch.Tensor]) -> None:
    missing = set(wanted)
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in missing & set(opened.keys()):
                wanted[name].copy_(opened.get_tensor(name))
                missing.discard(name)
    if missing:
        raise UserError(f"model.path: {directory} has no weight {sorted(missing)[0]}")
