"""One shard of a stage: builds models as a worker does, without a lead, a feeder or other cells."""

import contextlib
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import psutil
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from gyre.child import Endpoint
from gyre.training.accumulators import Accumulators
from gyre.training.core import CoreModel, begin_world
from gyre.training.model import SatelliteModel
from gyre.training.packing import blank
from gyre.training.stages import load_stage
from tests.training.cells import make_config
from tests.training.test_packed import step_of

CPU = torch.device("cpu")
UPDATES, LR, CLIP = 5, 1e-3, 0.5


def micro_steps(update: int) -> list:
    """Five micro-steps of an update, a function of its number alone."""
    return [step_of([5 + i, 9, 3 + 2 * i], seed=10 * update + i) for i in range(5)]


def total(number: float) -> float:
    """The sum over the shards."""
    tensor = torch.tensor([number], dtype=torch.float64)
    dist.all_reduce(tensor)
    return float(tensor)


class Source:
    """What a satellite copies its weights from."""

    snapshot = 1

    def __init__(self, weights: dict) -> None:
        self.weights = weights

    def copy_into(self, own: dict) -> None:
        for name, tensor in own.items():
            tensor.copy_(self.weights[name])


class Program:
    """The operations."""

    def __init__(self) -> None:
        self.core: CoreModel | None = None

    def start(self, shard: int, shards: int, store: str) -> None:
        begin_world(CPU, None, shard, shards, dist.FileStore(store, shards))
        self.shard, self.shards = shard, shards

    # -- accumulators ------------------------------------------------------------------------------------------------
    def accumulate(self, seed: int, bucket_bytes: int) -> dict:
        """Gradients that come in another order on each shard, and not all of them; whole numbers, so exact."""
        from gyre.training import accumulators as module

        module._BUCKET_BYTES = bucket_bytes
        draw = torch.Generator().manual_seed(seed)
        shapes = [(3,), (2, 5), (7,), (1,), (4, 4), (11,), (2, 2, 2)]
        parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
        aside = torch.zeros(5, requires_grad=True)
        group = dist.new_group() if self.shards > 1 else None
        sums = Accumulators(parameters, CPU, group, alone=[parameters[2]], aside=[aside])
        sums.hook()
        sums.begin()
        expected = [torch.zeros(shape) for shape in shapes]
        beside = torch.zeros(5)
        for _ in range(4):
            for shard in range(self.shards):
                used = torch.rand(len(shapes) + 1, generator=draw) < 0.7
                order = torch.randperm(len(shapes), generator=draw).tolist()
                values = [torch.randint(-9, 9, p.shape, generator=draw).float() for p in [*parameters, aside]]
                for i in range(len(shapes)):
                    expected[i] += values[i] * used[i]
                beside += values[-1] * used[-1]
                if shard != self.shard:
                    continue
                for i in order:
                    if used[i]:
                        (parameters[i] * values[i]).sum().backward()
                if used[-1]:
                    (aside * values[-1]).sum().backward()
                sums.flush()
        found = [tensor.clone() for _, tensor in sums.gather()]
        wrong = sum(not torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        squares = math.isclose(total(sums.square_sum()), sum(float((t**2).sum()) for t in expected))
        own = -(-5 // self.shards)
        begin = self.shard * own
        share = sums.piece(aside)[: max(0, min(5 - begin, own))]
        return {"wrong": wrong, "squares": squares, "aside": torch.equal(share, beside[begin : begin + own])}

    # -- the core ----------------------------------------------------------------------------------------------------
    def build(self, model: str, dtype: str, train: dict) -> None:
        config = make_config(shards=self.shards, **train)
        config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})
        self.core = CoreModel(Path(model), config, CPU)

    def train(self, first: int, last: int, blanks: bool = False) -> dict:
        """Updates of the core; the norms before clipping."""
        norms = []
        for update in range(first, last + 1):
            steps, weight = micro_steps(update), 0.0
            steps += [blank()] * (-len(steps) % self.shards)
            self.core.accumulators.begin()
            for step in steps[self.shard :: self.shards]:
                weight += self.core.compute(step).weight
            weight = total(weight)
            norm = math.sqrt(total(self.core.square_sum())) / weight
            norms.append(norm)
            self.core.step(min(1.0, CLIP / norm) / weight, LR)
        return {"norms": norms}

    def weights(self, file: str) -> None:
        found = {name: tensor.clone() for name, tensor in self.core.named()}
        if self.shard == 0:
            save_file(found, file)

    def save(self, directory: str, tag: str) -> None:
        self.core.save(Path(directory), tag)

    def restore(self, directory: str, tag: str) -> None:
        self.core.restore(Path(directory), tag)

    def memory(self) -> dict:
        return self.core.memory()

    # -- a satellite -------------------------------------------------------------------------------------------------
    def satellite(self, model: str, train: dict) -> dict:
        """One update's sum by a satellite with the core's weights, and what it holds; against the core's own sum."""
        config = make_config(shards=self.shards, **train)
        satellite = SatelliteModel(Path(model), config, CPU)
        weights = {name: tensor.clone() for name, tensor in self.core.named()}
        steps = micro_steps(99)
        steps += [blank()] * (-len(steps) % self.shards)
        answer = {}
        for _ in range(2):
            satellite.load(Source(weights))
            wrong = [n for n, t in satellite.named() if not torch.equal(t, weights[n])]
            sums = []
            for each in (self.core, satellite):
                each.accumulators.begin()
                for step in steps[self.shard :: self.shards]:
                    each.compute(step)
                sums.append(each.accumulators.flat.data.clone())
            held = satellite.memory()
            satellite.park()
            answer = {
                "wrong": wrong,
                "difference": float((sums[0] - sums[1]).abs().max()),
                "size": float(sums[0].abs().max()),
                "held": held,
                "parked": satellite.memory(),
            }
            self.core.accumulators.flat.release()
        return answer

    def resident(self, model: str, train: dict) -> dict:
        """Resident bytes of a satellite's process: empty, computing, parked."""
        config = make_config(shards=self.shards, **train)
        satellite = SatelliteModel(Path(model), config, CPU)
        weights = load_stage(Path(model), torch.float32, CPU, True)
        satellite.load(Source({n: p.detach() for n, p in weights.weights()}))
        del weights
        satellite.park()
        process = psutil.Process()
        empty = process.memory_info().rss
        satellite.load(Source({n: p.detach() for n, p in load_stage(Path(model), torch.float32, CPU, True).weights()}))
        satellite.accumulators.begin()
        satellite.compute(micro_steps(1)[0])
        busy, held = process.memory_info().rss, sum(satellite.memory().values())
        satellite.park()
        return {"empty": empty, "busy": busy, "parked": process.memory_info().rss, "held": held}


def main() -> None:
    """Entry point."""
    endpoint, program = Endpoint(), Program()
    names = [name for name in dir(program) if not name.startswith("_") and callable(getattr(program, name))]
    with contextlib.suppress(BrokenPipeError):
        endpoint.serve({name: getattr(program, name) for name in names})


if __name__ == "__main__":
    main()
