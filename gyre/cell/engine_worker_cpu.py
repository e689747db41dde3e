"""The worker class of engines on CPUs: vLLM's, with a sleep that releases memory (vLLM's own ignores the call)."""

from __future__ import annotations

import ctypes

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


class CpuWorker(Weights, CPUWorker):
    """Tensors keep their identity through sleep and wake; only their storages come and go."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self._released_weights: Released = []
        self._released_kv: Released = []

    def load_model(self, *args: object, **kwargs: object) -> None:
        """Load the model as it is started with."""
        super().load_model(*args, **kwargs)
        self.gyre_loaded()

    def gyre_loaded(self) -> None:
        """Drop the packed copy of an embedding that only a separate output layer would multiply with."""
        model = self.model_runner.get_model()
        if any(isinstance(module, ParallelLMHead) for module in model.modules()):
            for module in model.modules():
                if isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead):
                    module.__dict__.pop("cpu_linear", None)
        _trim()

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
