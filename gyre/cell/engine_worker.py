"""What runs inside vLLM's workers: loading snapshots into the live model, and saying what the model holds.

vLLM mixes `Weights` into its own worker class, and the engine calls these methods by name. Loading goes through vLLM's
layer-by-layer reload, which fuses, shards and packs as at the start. The checksum is taken of each layer's parameters
after they were loaded and before they are packed: a CPU build drops them then.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from vllm.config import set_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.layers.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from gyre.checksum import Sums, add, sums


def snapshot_files(path: str) -> list[Path]:
    """The safetensors files of a snapshot: a file, or a directory of them."""
    files = sorted(Path(path).glob("*.safetensors")) if Path(path).is_dir() else [Path(path)]
    if not files or not all(file.is_file() for file in files):
        raise FileNotFoundError(f"no snapshot at {path}")
    return files


def snapshot_tensors(path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Named tensors of a snapshot, mapped and not read: each is copied when it is used."""
    for file in snapshot_files(path):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():
                yield name, opened.get_tensor(name)


class _Watched(QuantizeMethodBase):
    """A layer's quantisation method that reports the layer before it is packed."""

    def __init__(self, inner: QuantizeMethodBase, report: Callable[[nn.Module], None]) -> None:
        self._inner = inner
        self._report = report

    def create_weights(self, layer: nn.Module, *args: Any, **kwargs: Any) -> None:
        self._inner.create_weights(layer, *args, **kwargs)

    def apply(self, layer: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._inner.apply(layer, *args, **kwargs)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        self._report(layer)
        self._inner.process_weights_after_loading(layer)


class _Count:
    """Sums over a model's parameters while they are loaded, each counted once over all ranks."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._names = {id(module): name for name, module in model.named_modules()}
        self._by_layer: dict[int, Sums] = {}  # a layer that is loaded twice counts as it was loaded last

    def layer(self, layer: nn.Module) -> None:
        """Count a layer's own parameters."""
        name = self._names[id(layer)]
        parameters = layer.named_parameters(recurse=False)
        shards = ((f"{name}.{kind}", self._shard(layer, kind, p)) for kind, p in parameters)
        self._by_layer[id(layer)] = sums(shards)

    def _shard(self, layer: nn.Module, kind: str, parameter: torch.Tensor) -> torch.Tensor:
        """The part of a parameter that this rank counts; what several ranks hold alike is counted by one."""
        rank = get_tensor_model_parallel_rank()
        split = isinstance(layer, ColumnParallelLinear | VocabParallelEmbedding) or hasattr(layer, "w13_weight")
        split = split or (isinstance(layer, RowParallelLinear) and kind == "weight")
        if not split:
            return parameter if rank == 0 else parameter[:0]
        if isinstance(layer, QKVParallelLinear) and rank % layer.num_kv_head_replicas:
            return parameter[: layer.num_heads * layer.head_size]
        return parameter

    def finish(self) -> Sums:
        """Add the layers that are not packed (norms), and return the sums of all."""
        modules = dict(self._model.named_modules(remove_duplicate=False))
        counted = {id(p) for m in modules.values() if id(m) in self._by_layer for p in m.parameters(recurse=False)}
        for module in self._model.modules():
            own = [p for p in module.parameters(recurse=False) if id(p) not in counted]
            if own and any(p.numel() for p in own):
                self.layer(module)
                counted.update(id(p) for p in own)
        total: Sums = {}
        for part in self._by_layer.values():
            total = add(total, part)
        return total


@contextlib.contextmanager
def _watched(model: nn.Module, report: Callable[[nn.Module], None]) -> Iterator[None]:
    """Have every layer reported before it is packed."""
    layers = [m for m in model.modules() if isinstance(getattr(m, "quant_method", None), QuantizeMethodBase)]
    for layer in layers:
        layer.quant_method = _Watched(layer.quant_method, report)
    try:
        yield
    finally:
        for layer in layers:
            layer.quant_method = layer.quant_method._inner


def _packed_bytes(layer: nn.Module) -> int:
    """Bytes of a layer's packed copy, which is held by the closure that multiplies with it."""
    size = 0
    for cell in getattr(getattr(layer, "cpu_linear", None), "__closure__", None) or ():
        held = cell.cell_contents
        if isinstance(held, torch.Tensor):
            size += held.untyped_storage().nbytes()
        elif hasattr(held, "handler_tensor"):  # oneDNN's, of k x n elements
            size += held.k * held.n * layer.weight.element_size()
    return size


def _storages(tensors: Iterator[torch.Tensor]) -> list[torch.UntypedStorage]:
    unique: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        unique.setdefault(storage._cdata, storage)
    return list(unique.values())


class Weights:
    """Mixed into the worker class; every method is called on all workers of an engine."""

    def gyre_load(self, path: str) -> dict[str, Any]:
        """Replace the model's weights by a snapshot's, in place; returns this rank's sums over what it now holds."""
        started = time.monotonic()
        model = self.model_runner.get_model()
        count = _Count(model)
        snapshot_files(path)  # fail before the model is taken apart
        with set_current_vllm_config(self.vllm_config), _watched(model, count.layer):
            self.model_runner.reload_weights(weights_iterator=snapshot_tensors(path))
        with set_current_vllm_config(self.vllm_config):
            self.gyre_loaded()
        return {"sums": count.finish(), "seconds": time.monotonic() - started}

    def gyre_loaded(self) -> None:
        """Finish a load; a hook for worker classes."""

    def gyre_kv_export(self, plan: str, shards: list[str], generation: int, policy: int) -> None:
        """Copy planned KV blocks to this worker's shard; see `gyre.cell.kv_connector`."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        get_kv_transfer_group().export(plan, shards, generation, policy)

    def gyre_memory(self) -> dict[str, int]:
        """Bytes of weights and KV cache that this worker holds at this moment, and its process id."""
        weights = sum(s.nbytes() for s in _storages(iter(self.gyre_parameters())))
        packed = sum(_packed_bytes(module) for module in self.model_runner.get_model().modules())
        kv = sum(s.nbytes() for s in _storages(iter(self.gyre_kv_tensors())))
        return {"weights": weights + packed, "kv": kv, "pid": os.getpid()}

    def gyre_parameters(self) -> list[torch.Tensor]:
        """The model's parameters."""
        return list(self.model_runner.get_model().parameters())

    def gyre_kv_tensors(self) -> list[torch.Tensor]:
        """Tensors of the KV cache."""
        found: list[torch.Tensor] = []
        for layer in self.vllm_config.compilation_config.static_forward_context.values():
            cache = getattr(layer, "kv_cache", None)
            caches = cache if isinstance(cache, list | tuple) else [cache]
            found += [tensor for tensor in caches if isinstance(tensor, torch.Tensor)]
        return found
