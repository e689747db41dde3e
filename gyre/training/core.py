"""The core's model: authoritative weights and optimizer state in DeepSpeed. The one importer of deepspeed.

DeepSpeed does what it is good at: mixed precision, sharding of optimizer state, offload, checkpoints. What crosses
cells is ours: gradients leave it as they appear (`gyre.training.accumulators`), and the sum over all cells is put back
before its step. It lives in a world of the shards of one stage, and never learns of other stages or cells.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open

from gyre.config import Config
from gyre.errors import UserError
from gyre.training.batch import Batch
from gyre.training.model import DTYPES, CellModel, held, reference_of, trim_heap
from gyre.training.parking import Parked
from gyre.training.stages import load_stage
from gyre.training.statistics import Statistics


def begin_world(
    device: torch.device, interface: str | None, shard: int = 0, shards: int = 1, store: dist.Store | None = None
) -> None:
    """A default process group of the shards of one stage of this cell: DeepSpeed never sees anybody else.

    `store` is one that all of them reach, under a prefix of their stage.
    """
    if interface:
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = interface
    elif shards > 1:  # shards of a stage are on one host
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    rank = {"RANK": f"{shard}", "WORLD_SIZE": f"{shards}", "LOCAL_RANK": f"{device.index or 0}"}
    os.environ.update(rank, MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # torch's watchdog would end the process where a peer fails; here a failed reduce is repeated without that peer
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store or dist.HashStore(), rank=shard, world_size=shards)


def import_deepspeed(device: torch.device) -> Any:
    """DeepSpeed, set up so that nothing is compiled on first use.

    On a CPU it would build a shared-memory collective for its own process group, which can do without. Its table of
    usable ops is a cache meant to be edited.
    """
    os.environ["DS_ACCELERATOR"] = device.type
    import deepspeed
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def deepspeed_config(config: Config) -> dict[str, Any]:
    """DeepSpeed's configuration. Accumulation, norm and clipping are ours, so its own are off."""
    train = config.train
    optimizer = {
        "lr": train.lr,
        "betas": list(train.betas),
        "eps": 1e-8,
        "weight_decay": train.weight_decay,
        "torch_adam": True,  # no op is built
        "fused": True,  # without temporaries of the size of the model
    }
    # gradients never pass through DeepSpeed's buckets: what is set for each parameter is the sum of all cells
    zero: dict[str, Any] = {"stage": train.zero_stage, "reduce_bucket_size": 1_000_000}
    if train.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": optimizer},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "managed_gradient_accumulation": True,
        "data_types": {"grad_accum_dtype": "fp32"},
        "bf16": {"enabled": config.model.dtype == "bfloat16"},
    }


def _most(number: int, device: torch.device) -> int:
    """The largest of the numbers that the shards of this stage give."""
    tensor = torch.tensor(number, device=device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return int(tensor)


_Setter = Callable[[torch.nn.Parameter, torch.Tensor], None]


def _put(parameter: torch.nn.Parameter, value: torch.Tensor, whole: _Setter, piece: _Setter) -> None:
    """Give DeepSpeed the whole value of something of a parameter, or in ZeRO-3 this shard's piece.

    There it would cut pieces out of the whole by itself, but does not think of the padding of the last one.
    """
    if not hasattr(parameter, "ds_tensor"):
        whole(parameter, value)
        return
    size = parameter.ds_tensor.numel()
    own = value.reshape(-1)[dist.get_rank() * size :][:size]
    piece(parameter, torch.nn.functional.pad(own, (0, size - own.numel())))


class CoreModel(CellModel):
    """One worker's part of the authoritative weights and optimizer state, in a DeepSpeed engine (invariant 10)."""

    def __init__(
        self, directory: Path, config: Config, device: torch.device, stage: int = 0, initial: Path | None = None
    ) -> None:
        """Load a stage of the model of `directory`; its shards do so together.

        `initial` is the model that the objective keeps to, needed where `train.kl` is above 0.

        Raises:
            UserError: the model cannot be trained like that.
        """
        deepspeed = import_deepspeed(device)
        self._zero = deepspeed.zero
        self._zero_stage = config.train.zero_stage
        train = config.train
        dtype, recompute = DTYPES[config.model.dtype], train.checkpoint_activations
        reference = reference_of(initial, config, device, stage)
        own = load_stage(directory, dtype, device, True, stage, train.stages, recompute)
        super().__init__(own, config, device, reference)
        if train.stages == 1:
            self.scorer.check()
            if self.scorer.apart and train.zero_stage == 3 and config.shards > 1:
                raise UserError(
                    "train.zero_stage: samples of this model are run alone, so shards do not meet in ZeRO-3's "
                    "collectives; set train.zero_stage=2"
                )
        if train.zero_stage == 3 and config.shards > 1:  # DeepSpeed gathers the weights of a module at each call
            self.scorer.agree = functools.partial(_most, device=device)
        buffers = [(m, dict(m._buffers)) for m in self.scorer.modules()]
        self._engine, self._optimizer, _, _ = deepspeed.initialize(
            model=self.scorer, config=deepspeed_config(config), dist_init_required=False
        )
        self._run = self._engine
        for module, before in buffers:  # bf16 casts all buffers, and rotary frequencies must not lose their precision
            module._buffers.update(before)
        if config.model.dtype != "float32":
            self._take_full_precision(directory)
        self.accumulators.hook()
        self._parked: Parked | None = None
        self._window = contextlib.ExitStack()  # open from an update's first micro-step to its step
        self._open = False
        # DeepSpeed has each module count down the gradients that come before its weights are given back, from its last
        # forward pass on: the second of two micro-steps in flight would find the count used up by the first
        self._awaited: list[tuple[torch.nn.Module, int]] = []

    def _take_full_precision(self, directory: Path) -> None:
        """Start the fp32 masters from fp32 weights on disk, where it has them.

        DeepSpeed copies them from the rounded weights. Each master then sits in the middle of its rounding interval,
        and steps much smaller than the interval move no weight that anyone computes with until enough of them add up.
        """
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param

        own = dict(zip(self.names, self.parameters, strict=True))
        for file in sorted(directory.glob("*.safetensors")):
            with safe_open(file, "pt") as opened:
                for name in sorted(own.keys() & set(opened.keys())):
                    if opened.get_slice(name).get_dtype() == "F32":
                        value = opened.get_tensor(name)
                        _put(own[name], value, safe_set_full_fp32_param, safe_set_local_fp32_param)

    def forward(self, batch: Batch, received: torch.Tensor | None = None) -> tuple[torch.Tensor, Statistics | None]:
        """What this stage makes of a micro-step; see `CellModel.forward`."""
        self._open_window()
        made = super().forward(batch, received)
        if self._zero_stage == 3:
            self._awaited = [(m, m.__dict__.get("ds_grads_remaining", 0)) for m in self.scorer.modules()]
        return made

    def backward(self, output: torch.Tensor, gradient: torch.Tensor | None = None) -> None:
        """Add the gradients of what `forward` made to the sums; see `CellModel.backward`."""
        loss = output if gradient is None else (output.float() * gradient.float()).sum()
        for module, count in self._awaited:
            module.ds_grads_remaining = count
        self._engine.backward(loss, scale_wrt_gas=False)
        self.accumulators.flush()

    def _open_window(self) -> None:
        if not self._open:
            self._window.enter_context(self._engine.coalesce_grad_reduction())
            self._open = True

    def _close_window(self) -> None:
        self._open_window()  # leaving it makes DeepSpeed's gradients, also where this worker computed nothing
        self._window.close()
        self._open = False

    def square_sum(self) -> float:
        """Sum of the squares of this worker's share of the gradients' sum.

        The root of the sum over all workers, times the step's scale without clipping, is the gradient's norm.
        """
        return self.accumulators.square_sum()

    @torch.no_grad()
    def step(self, scale: float, lr: float) -> None:
        """Take an optimizer step on the gradients' sum times `scale`, at a learning rate.

        A scale of 0 says that there was nothing to learn from; then no step is taken.
        """
        from deepspeed.utils import safe_set_full_grad, safe_set_local_grad

        self._close_window()
        if scale > 0:
            self.accumulators.flat.data.mul_(scale)
            for parameter, gradient in self.accumulators.gather():
                _put(parameter, gradient, safe_set_full_grad, safe_set_local_grad)
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._engine.set_gradient_accumulation_boundary(True)
            self._engine.step()
        self.accumulators.release()

    def named(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights, each gathered for as long as it is looked at where ZeRO-3 keeps it in pieces."""
        if self._zero_stage < 3:
            yield from super().named()
            return
        for name, parameter in zip(self.names, self.parameters, strict=True):
            with self._zero.GatheredParameters([parameter]):
                yield name, parameter.data

    def save(self, directory: Path, tag: str) -> None:
        """Write weights and optimizer state under a tag."""
        self._engine.save_checkpoint(str(directory), tag=tag, save_latest=False)

    def restore(self, directory: Path, tag: str) -> None:
        """Load weights and optimizer state of a tag."""
        self._engine.load_checkpoint(str(directory), tag=tag)

    def memory(self) -> dict[str, int]:
        """Bytes held; DeepSpeed's copies of gradients count as gradients, master weights as optimizer."""
        sizes = super().memory()
        sizes["weights"] += held(p.ds_tensor for p in self.parameters if hasattr(p, "ds_tensor"))
        groups = getattr(self._optimizer, "averaged_gradients", {}).values()
        sizes["gradients"] += held(t for group in groups if group for t in group if t is not None)
        inner = self._optimizer.optimizer
        state = [t for s in inner.state.values() for t in s.values() if torch.is_tensor(t)]
        master = [p for group in inner.param_groups for p in group["params"]]
        sizes["optimizer"] = held(iter([*state, *master]))
        return sizes

    def park(self, keep_sum: bool) -> None:
        """Give gradients and accumulators back; a suspended update's sum stays, in CPU memory.

        On a GPU everything else moves to CPU memory too; on a CPU it is there already.
        """
        if not keep_sum:
            self.accumulators.release()
        if self.device.type != "cpu" and self._parked is None:
            roots = (self._engine, self._optimizer, self.accumulators, self._reference, self.scorer.tied)
            self._parked = Parked(self.device.type, *roots)
            torch.cuda.empty_cache()
        trim_heap()

    def wake(self) -> None:
        """Take back what `park` moved."""
        if self._parked is not None:
            self._parked.restore()
            self._parked = None
