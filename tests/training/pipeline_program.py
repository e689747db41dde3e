"""One stage of a pipeline: what it is told follows from a seed; its sums are compared with the whole model's."""

import contextlib
import math
import os
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist

from gyre.child import Endpoint
from gyre.errors import LinkFailed
from gyre.training import core
from gyre.training.batch import Batch
from gyre.training.core import CoreModel, begin_world, deepspeed_config
from gyre.training.links import connect
from gyre.training.model import DTYPES, CellModel, reference_of
from gyre.training.pipeline import Pipeline, Shape
from gyre.training.stages import EMBEDDING, load_stage
from tests.training.cells import make_config
from tests.training.shards_program import with_pieces
from tests.training.test_packed import step_of

CPU = torch.device("cpu")
LONGEST_PAUSE = 0.004


def words_of(seed: int) -> list:
    """What all stages are told: micro-steps of various sizes, and None for a drain, also where nothing is in flight."""
    draw = random.Random(seed)
    words: list = []
    for number in range(1, draw.randint(1, 7) + 1):
        lengths = [draw.randint(2, 24) for _ in range(draw.randint(1, 4))]
        words += [(number, step_of(lengths, seed=1000 * seed + number))]
        words += [None] * draw.choice([0, 0, 0, 1, 2])
    return [*words, None]


def at_once(options: dict) -> dict:
    """DeepSpeed would gather all of a model as small as these beforehand, and leave it so."""
    zero = {"stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0}
    return options | {"zero_optimization": options["zero_optimization"] | zero}


class Program:
    """The operations."""

    def __init__(self) -> None:
        self.off = False
        self.most_whole = 0  # weights of a core that are put together while it runs backward, in elements
        begin_world(CPU, None)

    def build(self, model: str, stage: int, stages: int, port: int, name: str, dtype: str, **train) -> None:
        """Build a stage of a model, and the whole of it to compare with; meet the others."""
        config = make_config(stages=stages, **train)
        self.stage, self.stages = stage, stages
        cell = [load_stage(Path(model), DTYPES[dtype], CPU, True, *own) for own in ((stage, stages), (0, 1))]
        self.runner, self.whole = (CellModel(each, config, CPU, None) for each in cell)
        if config.train.kl:
            self.runner._reference = reference_of(Path(model), config, CPU, stage)
            self.whole._reference = reference_of(Path(model), make_config(**train), CPU, 0)
        for each in (self.runner, self.whole):
            each.accumulators.hook()
        self._join(config, port, name, dtype)

    def _join(self, config, port: int, name: str, dtype: str) -> None:
        stage, stages = self.stage, self.stages
        store = dist.PrefixStore(name, dist.TCPStore("127.0.0.1", port, None, is_master=False))
        links = connect(store, stage, stages, CPU, "127.0.0.1", lambda: self.off)
        shape = Shape(self.runner.scorer.hidden_size, DTYPES[dtype], 2 if config.train.kl else 1)
        self.pipeline = Pipeline(self.runner, stage, stages, links, shape, CPU)

    def core(self, model: str, stage: int, stages: int, port: int, name: str, dtype: str, **train) -> None:
        """As `build`, with cores: DeepSpeed's engines with their optimizers."""
        self.stage, self.stages, self.most_whole = stage, stages, 0
        core.deepspeed_config = lambda *known: at_once(with_pieces(deepspeed_config(*known)))
        configs = [make_config(stages=stages, **train), make_config(**train)]
        named = {"path": "unused", "dtype": dtype}
        configs = [c.model_copy(update={"model": c.model.model_copy(update=named)}) for c in configs]
        self.runner = CoreModel(Path(model), configs[0], CPU, stage)
        self.whole = CoreModel(Path(model), configs[1], CPU)
        for parameter in self.runner.parameters:
            parameter.register_post_accumulate_grad_hook(lambda _: self._look())
        self._join(configs[0], port, name, dtype)

    def _look(self) -> None:
        self.most_whole = max(self.most_whole, sum(p.numel() for p in self.runner.parameters))

    def step(self, squares: float, weight: float, clip: float, lr: float) -> dict:
        """An update of the stage and of the whole; how far norms and weights are from each other."""
        norms = [squares**0.5 / weight, self.whole.square_sum() ** 0.5 / weight]
        for model, norm in zip((self.runner, self.whole), norms, strict=True):
            model.step(min(1.0, clip / norm) / weight, lr)
        wanted = dict(self.whole.named())
        far = [float((t.float() - wanted[n].float()).abs().max()) for n, t in self.runner.named()]
        mean = [float((t.float() - wanted[n].float()).abs().mean()) for n, t in self.runner.named()]
        if self.runner.scorer.tied is not None:  # in a run it is taken from the snapshot
            self.runner.scorer.tied.data.copy_(wanted[EMBEDDING])
        return {"norms": norms, "far": max(far), "mean": max(mean)}

    def run(self, seed: int, still: bool = False) -> dict:
        """Carry the words of a seed out; how far the sums are from those of one process."""
        draw = random.Random(f"{seed} {self.stage}")
        self.runner.accumulators.begin()
        done, most = [], 0
        for word in words_of(seed):
            if not still and draw.random() < 0.5:
                time.sleep(draw.random() * LONGEST_PAUSE)
            done += self.pipeline.drain() if word is None else self.pipeline.feed(word[0], Batch.of(word[1], CPU))
            most = max(most, self.pipeline.in_flight)
        if self.runner.shared is not None and self.tied():
            for _ in range(2):  # the second changes nothing
                self.pipeline.fold(self.runner.accumulators.piece(self.runner.shared))
        found = self.compare(seed, done)
        squares, whole = self.runner.accumulators.square_sum(), self.most_whole
        return {"ids": [d.id for d in done], "most": most, "squares": squares, "whole": whole, **found}

    def tied(self) -> bool:
        """Whether the matrix is on two stages."""
        return self.stages > 1 and EMBEDDING in self.whole.names and "lm_head.weight" not in self.whole.names

    def compare(self, seed: int, done: list) -> dict:
        """The largest difference, by the largest element of each tensor, and the norm of all; the statistics too."""
        self.whole.accumulators.begin()
        steps = [word[1] for word in words_of(seed) if word is not None]
        known = [self.whole.compute(step) for step in steps]
        wanted = dict(zip(self.whole.names, (g.clone() for _, g in self.whole.accumulators.gather()), strict=True))
        found = dict(zip(self.runner.names, (g for _, g in self.runner.accumulators.gather()), strict=True))
        # the first token of a sample sees itself alone, so that its query has no gradient
        far = [float((found[n] - wanted[n]).abs().max() / wanted[n].abs().max().clamp(min=1e-6)) for n in found]
        error = [float((found[n] - wanted[n]).norm()) for n in found]
        norm = [float(wanted[n].norm()) for n in found]
        if self.stage == self.stages - 1:
            for one, other in zip(known, (d.statistics for d in done), strict=True):
                far.append(abs(one.loss - other.loss) / (1 + abs(one.loss)))
                far.append(abs(one.kl_reference - other.kl_reference) / (1 + one.kl_reference))
        if self.runner.scorer.tied is not None:
            far.append(float(self.runner.accumulators.aside.data.abs().max()))  # it has moved
        return {
            "far": max(far),
            "error": math.hypot(*error) / math.hypot(*norm),
            "weight": sum(k.weight for k in known),
            "names": self.runner.names,
        }

    def half(self) -> dict:
        """Feed without end, until a neighbour fails; the error."""
        self.runner.accumulators.begin()
        step = step_of([9, 5], seed=1)
        try:
            for number in range(1, 10**6):
                self.pipeline.feed(number, Batch.of(step, CPU))
        except LinkFailed as error:
            return {"error": str(error)}
        return {"error": ""}

    def wait(self, off: bool) -> dict:
        """Wait for a neighbour that says nothing; `off` is what the wait is told when it asks."""
        self.off = off
        try:
            self.pipeline.drain() if self.pipeline.in_flight else self.pipeline.feed(1, Batch.of(step_of([4]), CPU))
            self.pipeline.drain()
        except LinkFailed as error:
            return {"error": str(error)}
        finally:
            self.off = False
        return {"error": ""}

    def die(self) -> None:
        os._exit(9)


def main() -> None:
    """Entry point."""
    endpoint, program = Endpoint(), Program()
    torch.set_num_threads(1)
    names = [name for name in dir(program) if not name.startswith("_") and callable(getattr(program, name))]
    with contextlib.suppress(BrokenPipeError):
        endpoint.serve({name: getattr(program, name) for name in names})


if __name__ == "__main__":
    main()
