"""What of a KV handoff runs inside vLLM: a connector with a scheduler's and a worker's side, as vLLM knows it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, UniformTypeKVCacheSpecs

from gyre.cell.kv_scheduler import SchedulerSide
from gyre.cell.kv_worker import Load, WorkerSide

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


def transfer_config(page: str, transport_name: str, limit: int) -> dict[str, Any]:
    """vLLM's kv-transfer-config for the connector; `page` is the path of the engine's own page, `limit` in bytes."""
    return {
        "kv_connector": "Handoff",
        "kv_connector_module_path": __name__,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"page": page, "transport": transport_name, "limit": limit},
    }


def demand_whole_prefixes(config: KVCacheConfig) -> None:
    """Check that there is one kind of cache, in which a request has a block for all of its tokens.

    Raises:
        ValueError: there is not: windows slide, or states stand for all that came before.
    """
    groups = config.kv_cache_groups
    specs = [group.kv_cache_spec for group in groups]
    for spec in list(specs):
        if isinstance(spec, UniformTypeKVCacheSpecs):
            specs = [one for one in specs if one is not spec] + list(spec.kv_cache_specs.values())
    if len(groups) != 1:
        raise ValueError("serving.kv_handoff: this model has several kinds of KV cache; set serving.kv_handoff=false")
    if odd := sorted({type(spec).__name__ for spec in specs if not isinstance(spec, FullAttentionSpec)}):
        raise ValueError(
            f"serving.kv_handoff: this model's KV cache ({', '.join(odd)}) keeps no block of every token; "
            "set serving.kv_handoff=false"
        )


@dataclass
class Loads(KVConnectorMetadata):
    """What the workers are to do in a step."""

    loads: list[Load] = field(default_factory=list)


class Handoff(KVConnectorBase_V1):
    """The connector, as vLLM knows it."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        demand_whole_prefixes(kv_cache_config)
        scheduler = role is KVConnectorRole.SCHEDULER
        self._scheduler = SchedulerSide(vllm_config, kv_cache_config) if scheduler else None
        self._worker = None if scheduler else WorkerSide(vllm_config, kv_cache_config)

    @property
    def requires_kv_delivery(self) -> bool:
        """What is not handed off is computed again; nothing depends on it."""
        return False

    # -- the scheduler's side ----------------------------------------------------------------------------------------
    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """The blocks of this engine, to be kept from others while they are pinned."""
        self._scheduler.bind(gpu_block_pool)

    def on_new_request(self, request: Request) -> None:
        """Know a request before its first step."""
        self._scheduler.added(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens that another engine left; they are loaded within a step, never beside it."""
        return self._scheduler.matched(request, num_computed_tokens), False

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Note where they are to be loaded to."""
        self._scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Follow what a step does to blocks."""
        return Loads(self._scheduler.scheduled(scheduler_output))

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Blocks are pinned by counting them once more: the request itself ends here."""
        self._scheduler.finished(request, block_ids)
        return False, None

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Hear how a step went."""
        self._scheduler.computed(connector_output.invalid_block_ids)

    def reset_cache(self) -> bool:
        """Write the plan of an export, if one is on, and forget everything."""
        self._scheduler.reset()
        return True

    # -- the worker's side -------------------------------------------------------------------------------------------
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take over the caches."""
        self._worker.register(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Load what this step needs, before it computes."""
        self._worker.load(self._get_connector_metadata().loads)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that vLLM has to compute."""
        return self._worker.failed()

    def export(self, plan: str, shards: list[str], generation: int, policy: int) -> None:
        """Copy planned blocks out, as the engine asks for over its workers."""
        self._worker.export(plan, shards, generation, policy)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is on its way: loads are done when they return."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing is saved while an engine computes."""

    def wait_for_save(self) -> None:
        """Nothing is being saved."""
