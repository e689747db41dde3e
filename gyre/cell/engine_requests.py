"""Requests as vLLM's engine takes them here: prompts made of known tokens, answers that go on after known tokens.

A proxy's extension (`gyre.splice`) comes in a request's extra arguments. `Engine` extends vLLM's at its one entrance,
`generate`, where the prompt's tokens are replaced, and at its one way to the core, `_add_request`. There, tokens that
were sampled elsewhere pass through vLLM's own output processor, as though they had been sampled here, and the core goes
on after them. So text, stop strings, tool calls and reasoning need nothing of ours.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
import numpy as np
from vllm.exceptions import VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import RequestOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.outputs import LogprobsLists

from gyre.cell.gate import prompt_notes
from gyre.splice import ARGUMENT, Extension, resolve

_KEPT = "gyre_kept"  # among a request's extra arguments, on their way to `_add_request`: the known tokens of its answer
_AT_ONCE = 256  # known tokens between two turns of other requests
_TRANSFERS = {"kv_transfer_params", "ec_transfer_params"}  # extra arguments that have no say in what is sampled
_SHOWN = "gyre_shown"  # on the output of known tokens: the outputs before it


class Engine(AsyncLLM):
    """vLLM's engine, with answers that go on after tokens which were sampled elsewhere."""

    #: Known tokens are shown to who reads the answer one by one, for parsers that are right only then; else at once.
    by_token = False

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        ends = self.input_processor.generation_config_fields.get("eos_token_id")
        named = {self.renderer.get_eos_token_id(), *(ends if isinstance(ends, list) else [ends])}
        self._ends = frozenset(named - {None})  # tokens that end a turn of this model

    def generate(
        self, prompt: Any, sampling_params: SamplingParams, *args: Any, **more: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """As vLLM's, with the prompt that a request has by its extension; an answer begins with its known tokens.

        Raises:
            VLLMValidationError: at once, so that the answer's status can still say it.
        """
        kind = prompt.get("type") if isinstance(prompt, dict) else None
        if kind not in ("token", "multimodal"):
            return super().generate(prompt, sampling_params, *args, **more)
        params, extension = _extension(sampling_params)
        self._verify(params)
        if kind == "multimodal":  # what its placeholders stand for belongs to the rendering
            extension = Extension(kept=extension.kept)
        ids, note = resolve(prompt["prompt_token_ids"], extension, self._ends_of(params), self._decode)
        if note.spliced:
            prompt = {**prompt, "prompt_token_ids": ids.tolist()}
            params = self._fitting(params, prompt["prompt_token_ids"])
        if (notes := prompt_notes.get()) is not None:
            notes.append(dataclasses.replace(note, constrained=self._constrained(params)))
        if not extension.kept:
            return super().generate(prompt, params, *args, **more)
        if params.n > 1:
            raise VLLMValidationError("an answer can only go on after known tokens with n = 1", parameter="n")
        kept = extension.kept.tolist()
        self.renderer.validate_token_ids(kept)
        params.extra_args = {**(params.extra_args or {}), _KEPT: kept}
        return _with_replay(super().generate(prompt, params, *args, **more))

    def _verify(self, params: SamplingParams) -> None:
        """Check parameters at once: vLLM does when a stream has begun, and then takes a client's error for its own."""
        if params.structured_outputs is not None:
            params = copy.deepcopy(params)  # a check changes them
        config = self.vllm_config
        limits = (config.speculative_config, config.structured_outputs_config)
        params.verify(self.model_config, *limits, self.renderer.tokenizer)

    def _constrained(self, params: SamplingParams) -> bool:
        """Whether these parameters, as they came out, let more shape what is sampled than a proxy sees in its request.

        What it sees (temperature, cuts, penalties, biases, allowed tokens, the least length) it judges itself.
        """
        grammar = params.structured_outputs
        watermark = getattr(self.vllm_config, "watermark_config", None) is not None and params.watermarking is not False
        return bool(
            (grammar is not None and not grammar.all_constraints_none())
            or watermark
            or params.thinking_token_budget is not None
            or params.bad_words
            or params.trace_decode_token_ids
            or (params.extra_args or {}).keys() - _TRANSFERS  # for processors of logits
            or self.model_config.logits_processors
        )

    def _decode(self, ids: list[int]) -> str:
        """The text of ids as answers are given it: special tokens included, nothing cleaned up."""
        tokenizer = self.renderer.get_tokenizer()
        if (fast := getattr(tokenizer, "backend_tokenizer", None)) is not None:
            return fast.decode(ids, skip_special_tokens=False)
        return tokenizer.decode(ids, skip_special_tokens=False)

    def _ends_of(self, params: SamplingParams) -> frozenset[int]:
        """Tokens that end a turn, those included that a request names, if they are not ordinary text."""
        if not params.stop_token_ids:
            return self._ends
        return self._ends | {*params.stop_token_ids} & {*self.renderer.get_tokenizer().get_added_vocab().values()}

    def _fitting(self, params: SamplingParams, ids: list[int]) -> SamplingParams:
        """The same with room for no more tokens than another prompt leaves; vLLM has counted the rendering."""
        self.renderer.validate_token_ids(ids)
        limit = self.model_config.max_model_len
        if not ids:
            raise VLLMValidationError("The prompt must not be empty.")
        if len(ids) >= limit:  # in vLLM's words for a rendering that is too long
            raise VLLMValidationError(
                f"This model's maximum context length is {limit} tokens, one of them the answer's at least. However, "
                f"your prompt contains {len(ids)} input tokens."
            )
        params = copy.copy(params)
        room = limit - len(ids)
        params.max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        params.min_tokens = min(params.min_tokens, params.max_tokens)
        return params

    async def _add_request(
        self,
        request: EngineCoreRequest,
        prompt: str | None,
        parent_req: ParentRequest | None,
        index: int,
        queue: RequestOutputCollector,
    ) -> None:
        params = request.sampling_params
        kept = ((params and params.extra_args) or {}).get(_KEPT)
        if not kept:
            await super()._add_request(request, prompt, parent_req, index, queue)
            return
        assert params is not None and params.extra_args is not None
        params.extra_args = {key: value for key, value in params.extra_args.items() if key != _KEPT} or None
        self.check_admission(request_id=request.request_id)
        self.output_processor.add_request(request, prompt, parent_req, index, queue)
        try:
            await self._replay(request, kept, queue)
            state = self.output_processor.request_states.get(request.request_id)
            if state is not None:  # they do not end the answer
                state.is_prefilling = True  # what is cached of the prompt, and when a token comes, is still to be seen
                await self.engine_core.add_request_async(_continued(request, kept))
        except BaseException:
            await self.abort(request.request_id, internal=True)
            raise

    async def _replay(self, request: EngineCoreRequest, kept: list[int], queue: RequestOutputCollector) -> None:
        """Have the known tokens go the way of sampled ones; what comes of the last is in the queue, with the others."""
        params = request.sampling_params
        assert params is not None and request.prompt_token_ids is not None
        room = self.model_config.max_model_len - len(request.prompt_token_ids)
        count, finish, stop = _ending(params, kept, room)
        size = 1 if self.by_token and params.output_kind == RequestOutputKind.DELTA else _AT_ONCE
        shown: list[RequestOutput] = []
        for start in range(0, count, size):
            if (output := queue.get_nowait()) is not None:
                shown.append(output)
            tokens, last = kept[start : min(start + size, count)], start + size >= count
            output = EngineCoreOutput(
                request_id=request.request_id,
                new_token_ids=tokens,
                new_logprobs=None if params.num_logprobs is None else _placeholders(tokens),
                finish_reason=finish if last else None,
                stop_reason=stop if last else None,
            )
            self.output_processor.process_outputs([output])
            if not self.output_processor.has_request(request.request_id):  # a stop string, or a client that left
                break
            if (start + size) % _AT_ONCE == 0:
                await asyncio.sleep(0)
        if queue.output is None and shown:
            queue.put(shown.pop())
        if queue.output is not None:
            setattr(queue.output, _SHOWN, shown)


async def _with_replay(outputs: AsyncGenerator[RequestOutput, None]) -> AsyncGenerator[RequestOutput, None]:
    """The outputs, those of known tokens as soon as the first new one says how much of the prompt was cached."""
    held: list[RequestOutput] = []
    async with contextlib.aclosing(outputs):
        async for output in outputs:
            known = getattr(output, _SHOWN, None)
            if known is not None:
                held = [*known] if output.finished else [*known, output]
                if not output.finished:
                    continue
            for number, earlier in enumerate(held, 1):
                earlier.num_cached_tokens = output.num_cached_tokens
                yield earlier
                if number % _AT_ONCE == 0:
                    await asyncio.sleep(0)
            held = []
            yield output


def _extension(params: SamplingParams) -> tuple[SamplingParams, Extension]:
    """A request's extension, and its parameters without."""
    if not params.extra_args or not {ARGUMENT, _KEPT} & set(params.extra_args):
        return params, Extension()
    text, params = params.extra_args.get(ARGUMENT, "{}"), copy.copy(params)
    params.extra_args = {key: value for key, value in params.extra_args.items() if key not in (ARGUMENT, _KEPT)} or None
    try:
        return params, Extension.decode(text)
    except ValueError as error:
        raise VLLMValidationError(f"the extension of this request: {error}", parameter=ARGUMENT) from error


def _ending(params: SamplingParams, kept: list[int], room: int) -> tuple[int, FinishReason | None, int | None]:
    """How many of the tokens belong to the answer, and why it ends with them, by the rules of vLLM's scheduler."""
    limit = min(room, params.max_tokens or room)
    stops = params.stop_token_ids or ()
    for count, token in enumerate(kept, 1):
        if token == params.eos_token_id:
            return count, FinishReason.STOP, None
        if token in stops:
            return count, FinishReason.STOP, token
        if count >= limit:
            return count, FinishReason.LENGTH, None
    return len(kept), None, None


def _placeholders(tokens: list[int]) -> LogprobsLists:
    """Log-probabilities of 0, each token the best: those who sampled them know the real ones."""
    ids = np.array(tokens, dtype=np.int64)[:, None]
    return LogprobsLists(ids, np.zeros(ids.shape, dtype=np.float32), np.ones(len(tokens), dtype=np.int64))


def _continued(request: EngineCoreRequest, kept: list[int]) -> EngineCoreRequest:
    """What vLLM's core is asked: the rest of the answer."""
    params = copy.copy(request.sampling_params)
    assert params is not None and request.prompt_token_ids is not None
    if params.max_tokens is not None:
        params.max_tokens -= len(kept)
    params.min_tokens = max(0, params.min_tokens - len(kept))
    changes = {"prompt_token_ids": [*request.prompt_token_ids, *kept], "sampling_params": params}
    return msgspec.structs.replace(request, **changes)
