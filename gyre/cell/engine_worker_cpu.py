"""The worker class of engines on CPUs: vLLM's, with a sleep that releases memory (vLLM's own ignores the call)."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

import torch
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.v1.worker.cpu_worker import CPUWorker

from gyre.cell.engine_worker import Weights, _storages

Released = list[tuple[torch.UntypedStorage, int]]


def _trim() -> None:
    """Give freed memory back to the system; glibc would keep it."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)


def _release(storages: list[torch.UntypedStorage]) -> Released:
    released = [(storage, storage.nbytes()) for storage in storages if storage.nbytes()]
    for storage, _ in released:
        storage.resize_(0)
    return released


def _restore(released: Released) -> None:
    while released:
        storage, size = released.pop()
        storage.resize_(size)


@contextlib.contextmanager
def _undrawn(runner: Any) -> Iterator[None]:
    """Keep the generators of requests whose prompt is not yet whole out of a step's sampling.

    vLLM samples for them too, discards the token and winds the generator back; one of a CPU cannot be wound back, and
    the engine dies of trying. So nothing is drawn from it, and a seed gives the same tokens however prompts are cut.
    """
    generators, cut = runner.input_batch.generators, runner.discard_request_mask.np
    aside = {i: generators.pop(i) for i in list(generators) if cut[i]}
    try:
        yield
    finally:
        generators.update(aside)


class CpuWorker(Weights, CPUWorker):
    """Tensors keep their identity through sleep and wake; only their storages come and go."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self._released_weights: Released = []
        self._released_kv: Released = []

    def load_model(self, *args: object, **kwargs: object) -> None:
        """Load the model as it is started with."""
        super().load_model(*args, **kwargs)
        self._drop_unused_copies()
        self._packed_layers = [m for m in self.model_runner.get_model().modules() if "cpu_linear" in m.__dict__]

    def gyre_loaded(self) -> None:
        """Pack the output layer again, and see that every layer that multiplies has its packed copy.

        vLLM 0.32's reload skips an output layer whose weights are tied to the embedding's; it would go on with the old.
        """
        for module in self.model_runner.get_model().modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)
        bare = [type(module).__name__ for module in self._packed_layers if "cpu_linear" not in module.__dict__]
        if bare:
            raise RuntimeError(f"layers were not packed by this load: {', '.join(sorted(set(bare)))}")
        self._drop_unused_copies()
        _trim()

    def _drop_unused_copies(self) -> None:
        """An embedding is packed too; but with an output layer of its own, nothing multiplies with that copy."""
        modules = list(self.model_runner.get_model().modules())
        if any(isinstance(module, ParallelLMHead) for module in modules):
            for module in modules:
                if isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead):
                    module.__dict__.pop("cpu_linear", None)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Sample a step's tokens."""
        with _undrawn(self.model_runner):
            return super().sample_tokens(grammar_output)

    def sleep(self, level: int = 1) -> None:
        """Release KV cache and weights; the contents are gone at every level."""
        self._released_kv += _release(_storages(iter(self.gyre_kv_tensors())))
        for module in self.model_runner.get_model().modules():
            module.__dict__.pop("cpu_linear", None)  # holds the packed copy
        self._released_weights += _release(_storages(iter(self.gyre_parameters())))
        _trim()

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Bring memory back, without contents: weights come by a load, and the KV cache starts empty."""
        if tags is None or "weights" in tags:
            _restore(self._released_weights)
        if tags is None or "kv_cache" in tags:
            _restore(self._released_kv)
            for tensor in self.gyre_kv_tensors():
                tensor.zero_()  # attention multiplies whole blocks, and what memory holds may be no number
