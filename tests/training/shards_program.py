"""One shard of a stage: builds models as a worker does, without a lead, a feeder or other cells."""

import contextlib
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import psutil
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from gyre.child import Endpoint
from gyre.training import core, scorer
from gyre.training.accumulators import Accumulators
from gyre.training.batch import Batch
from gyre.training.core import CoreModel, begin_world, deepspeed_config
from gyre.training.model import SatelliteModel
from gyre.training.objectives import Objective, objective_loss
from gyre.training.packing import MicroStep, blank
from gyre.training.stages import load_stage
from tests.training.cells import VOCABULARY, make_config
from tests.training.test_packed import step_of

CPU = torch.device("cpu")
UPDATES, LR, CLIP = 5, 1e-3, 0.5
EVEN = 8  # micro-steps of an update in bf16


def micro_steps(update: int) -> list:
    """Five micro-steps of an update, a function of its number alone."""
    return [step_of([5 + i, 9, 3 + 2 * i], seed=10 * update + i) for i in range(5)]


def even_steps(update: int) -> list:
    """Micro-steps of weight 1 each, to the last bit: 16 trained tokens of weight 1/16."""
    steps = [step_of([20 + i, 30 - i], seed=100 * update + i) for i in range(EVEN)]
    return [
        MicroStep(
            s.id,
            s.tokens,
            s.starts,
            s.place[:16],
            *(a[:16] for a in floats(s)[:2]),
            np.full(16, 1 / 16, "f4"),
            floats(s)[3][:16],
        )
        for s in steps
    ]


def floats(step: MicroStep) -> tuple:
    return step.logprobs, step.advantages, step.weights, step.temperatures


def with_pieces(options: dict) -> dict:
    return options | {"zero_optimization": options["zero_optimization"] | {"stage3_param_persistence_threshold": 0}}


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
        # otherwise ZeRO-3 would leave parameters as small as these whole
        core.deepspeed_config = lambda *known: with_pieces(deepspeed_config(*known))
        config = make_config(shards=self.shards, **train)
        config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})
        self.core = CoreModel(Path(model), config, CPU, initial=Path(model))

    def train(self, first: int, last: int, even: bool = False, clip: float = CLIP) -> dict:
        """Updates of the core; the norms before clipping and the KL divergences."""
        norms, divergences = [], []
        for update in range(first, last + 1):
            steps, weight, divergence = self._own(even_steps(update) if even else micro_steps(update)), 0.0, 0.0
            self.core.accumulators.begin()
            for step in steps:
                statistics = self.core.compute(step)
                weight += statistics.weight
                divergence += statistics.kl_reference if step.id else 0.0  # nobody asks for a blank's
            weight = total(weight)
            norm = math.sqrt(total(self.core.square_sum())) / weight
            self.core.step(min(1.0, clip / norm) / weight, LR)
            norms.append(norm)
            divergences.append(total(divergence))
        return {"norms": norms, "divergences": divergences}

    def _own(self, steps: list) -> list:
        steps = steps + [blank()] * (-len(steps) % self.shards)
        return steps[self.shard :: self.shards]

    def masters(self, file: str) -> None:
        """The fp32 weights that the optimizer keeps."""
        from deepspeed.utils import safe_get_full_fp32_param

        found = {
            n: safe_get_full_fp32_param(p).clone() for n, p in zip(self.core.names, self.core.parameters, strict=True)
        }
        if self.shard == 0:
            save_file(found, file)

    def plain(self, model: str, file: str, updates: int) -> None:
        """Updates in bf16 by DeepSpeed with its own accumulation; writes its fp32 weights."""
        import deepspeed
        from deepspeed.utils import safe_get_full_fp32_param

        config = make_config()
        stage = load_stage(Path(model), torch.bfloat16, CPU, True)
        buffers = [(module, dict(module._buffers)) for module in stage.modules()]
        options = deepspeed_config(config) | {"bf16": {"enabled": True}, "gradient_accumulation_steps": EVEN}
        options["optimizer"]["params"]["lr"] = LR
        engine, *_ = deepspeed.initialize(model=stage, config=options, dist_init_required=False)
        for module, before in buffers:
            module._buffers.update(before)
        for update in range(1, updates + 1):
            for step in even_steps(update):
                batch = Batch.of(step, CPU)
                loss, _ = objective_loss(Objective.of(config.train), *engine(batch), batch)
                engine.backward(loss)  # divided by the number of micro-steps, which is the total weight
                engine.step()
        save_file({n: safe_get_full_fp32_param(p).clone() for n, p in stage.weights()}, file)

    def overlapped(self, model: str, train: dict) -> dict:
        """Sums with three micro-steps in flight at a time, as in a pipeline, against one at a time."""
        satellite = SatelliteModel(Path(model), make_config(shards=self.shards, **train), CPU)
        satellite.load(Source({name: tensor.clone() for name, tensor in self.core.named()}))
        batches = [Batch.of(step, CPU) for step in self._own(micro_steps(7) + micro_steps(8))]
        answer = {"whole": sum(p.numel() for p in self.core.parameters)}
        for name, each in {"core": self.core, "satellite": satellite}.items():
            sums = []
            for flying in (1, 3):
                each.accumulators.begin()
                outputs: list = []
                for batch in batches:
                    outputs.append(each.forward(batch)[0])
                    if len(outputs) == flying:
                        each.backward(outputs.pop(0))
                for output in outputs:
                    each.backward(output)
                sums.append(each.accumulators.flat.data.clone())
            answer[name] = float((sums[0] - sums[1]).abs().max() / sums[0].abs().max())
            each.accumulators.release()
        satellite.park()
        return answer

    def in_pieces(self, model: str, train: dict, rows: int) -> dict:
        """Sums of a core and a satellite where logits are made of so many tokens at a time; against one process.

        What the shards compute at the same time takes them different numbers of pieces; one of them ends with a blank.
        """
        satellite = SatelliteModel(Path(model), make_config(shards=self.shards, **train), CPU)
        satellite.load(Source({name: tensor.clone() for name, tensor in self.core.named()}))
        lengths = [[20, 11], [4], [6], [31], [9, 9], [9, 9], [40]]
        steps = [step_of(each, seed=number) for number, each in enumerate(lengths)]
        whole = load_stage(Path(model), torch.float32, CPU, True)
        for step in steps:
            batch = Batch.of(step, CPU)
            chosen, entropies = whole(batch)
            objective_loss(self.core.objective, chosen, entropies, batch, chosen.detach())[0].backward()
        wanted = {name: parameter.grad for name, parameter in whole.weights()}
        before, answer = scorer._LOGITS_BYTES, {}
        scorer._LOGITS_BYTES = 4 * rows * VOCABULARY
        try:
            for name, each in {"core": self.core, "satellite": satellite}.items():
                each.accumulators.begin()
                for step in self._own(steps):
                    each.compute(step)
                found = zip(each.names, each.accumulators.gather(), strict=True)
                far = max(float((gradient - wanted[n]).abs().max()) for n, (_, gradient) in found)
                answer[name] = far / max(float(gradient.abs().max()) for gradient in wanted.values())
                each.accumulators.release()
        finally:
            scorer._LOGITS_BYTES = before
        satellite.park()
        return answer

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
        steps = self._own(micro_steps(99))
        answer = {}
        for _ in range(2):
            satellite.load(Source(weights))
            wrong = [n for n, t in satellite.named() if not torch.equal(t, weights[n])]
            sums = []
            for each in (self.core, satellite):
                each.accumulators.begin()
                for step in steps:
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

    def resident(self, model: str, zero_stage: int) -> dict:
        """Resident bytes of this process with a satellite, and with a core: computing, and parked."""
        config = make_config(shards=self.shards, zero_stage=zero_stage)
        process = psutil.Process()
        stage = load_stage(Path(model), torch.float32, CPU, True)
        weights = {name: parameter.detach() for name, parameter in stage.weights()}
        answer = {}
        satellite = SatelliteModel(Path(model), config, CPU)
        for _ in range(2):  # the first time everything is touched that stays
            satellite.load(Source(weights))
            satellite.accumulators.begin()
            satellite.compute(self._own(micro_steps(1))[0])
            busy, held = process.memory_info().rss, sum(satellite.memory().values())
            satellite.park()
            answer["satellite"] = {"given": busy - process.memory_info().rss, "held": held}
        own = CoreModel(Path(model), config, CPU)
        for keep_sum in (True, False):
            own.accumulators.begin()
            own.compute(self._own(micro_steps(1))[0])
            busy, held = process.memory_info().rss, own.accumulators.held
            own.park(keep_sum=keep_sum)
            answer[f"core {keep_sum}"] = {"given": busy - process.memory_info().rss, "held": held}
        return answer


def main() -> None:
    """Entry point."""
    endpoint, program = Endpoint(), Program()
    names = [name for name in dir(program) if not name.startswith("_") and callable(getattr(program, name))]
    with contextlib.suppress(BrokenPipeError):
        endpoint.serve({name: getattr(program, name) for name in names})


if __name__ == "__main__":
    main()
