"""A real engine: prompts made of known tokens, and answers that go on after tokens which were sampled elsewhere."""

import asyncio
import json
from array import array

import pytest

from gyre import models
from gyre.proxy.dialects import errors
from gyre.splice import HEADER, Extension, History, PromptNote, digest
from tests.cell.talking_model import make
from tests.cell.test_engine import Engine, settings

CONTEXT = 640
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("run", "read")
]
STRICT = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
USER = {"role": "user", "content": "list it"}
CALL = '<tool_call>\n{"name": "run", "arguments": {"command":"ls","n": 3}}\n</tool_call>'
ANSWER = f"<think>\nhm, é\n</think>\n\nok, I look.\n{CALL}<|im_end|>"


class Talker(Engine):
    """An engine whose answers are whatever a test says was sampled."""

    def __init__(self, tiny, directory, log):
        self.tokenizer = make(tiny, directory)
        self.end = self.tokenizer.eos_token_id
        super().__init__(directory, log)

    def settings(self):
        args = {"kv-cache-memory-bytes": "32M", "tool-call-parser": "hermes", "reasoning-parser": "qwen3"}
        return settings(self.path, max_context=CONTEXT, args={**args, "enable-auto-tool-choice": True})

    def encode(self, text):
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def pieces(self, text):
        """Ids of a text as no encoder gives them: special tokens, and single bytes."""
        ids = []
        for token in self.encode(text):
            plain = self.tokenizer.convert_ids_to_tokens(token)
            ids += [token] if token >= 256 + 6 else self.tokenizer.convert_tokens_to_ids(list(plain))
        return ids

    async def ask(self, body, extension=None, path="/v1/chat/completions"):
        """The streamed answer: status, note and what it is made of."""
        if extension is not None:
            body = {**body, "vllm_xargs": {"gyre": extension.encode()}}
        common = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True, "temperature": 0}
        status, headers, data = await self.post({**common, **body}, path)
        note = headers.get(HEADER)
        return Answer(status, note and PromptNote.decode(note), data)

    def chat(self, messages=(USER,), extension=None, **body):
        body = {"messages": list(messages), "tools": TOOLS, "logprobs": True, "top_logprobs": 2, **body}
        return self.run(self.ask(body, extension))

    def text(self, prompt, extension=None, **body):
        return self.run(self.ask({"prompt": prompt, "logprobs": 1, **body}, extension, "/v1/completions"))


class Answer:
    """A streamed answer put together."""

    def __init__(self, status, note, data):
        self.status, self.note, self.data = status, note, data
        self.error = json.loads(data)["error"] if status != 200 else None
        self.prompt, self.usage, self.finish, self.stop = None, None, None, None
        self.ids, self.logprobs, self.calls = [], [], []
        self.said = {"content": "", "reasoning": "", "text": ""}
        for line in data.splitlines():
            if line.startswith(b"data: {"):
                self._add(json.loads(line[6:]))

    def _add(self, chunk):
        assert "error" not in chunk, chunk
        self.prompt = self.prompt or chunk.get("prompt_token_ids")
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk.get("choices", []):
            self.prompt = self.prompt or choice.get("prompt_token_ids")
            self.ids += choice.get("token_ids") or []
            self.finish = choice.get("finish_reason") or self.finish
            self.stop = choice.get("stop_reason") or self.stop
            given = choice.get("logprobs") or {}
            self.logprobs += given.get("token_logprobs") or [entry["logprob"] for entry in given.get("content") or []]
            delta = choice.get("delta") or {"text": choice.get("text")}
            for key in self.said:
                self.said[key] += delta.get(key) or ""
            for call in delta.get("tool_calls") or []:
                while len(self.calls) <= call["index"]:
                    self.calls.append({"name": "", "arguments": ""})
                for key, value in call["function"].items():
                    self.calls[call["index"]][key] += value or ""

    @property
    def message(self):
        return {**self.said, "calls": self.calls}


@pytest.fixture(scope="module")
def talker(tmp_path_factory, fork_server):
    directory = tmp_path_factory.mktemp("talking")
    engine = Talker(models.resolve("gyre:tiny"), directory, tmp_path_factory.mktemp("engine") / "engine.log")
    try:
        engine.run(engine.open())
        yield engine
        assert engine.run(engine.process.close()) == 0
        assert "Traceback" not in engine.log.read_text()  # no request above is the engine's fault
    finally:
        engine.stop()


def kept(ids, prompt=None):
    return Extension(prompt=None if prompt is None else array("i", prompt), kept=array("i", ids))


def close(one, other):
    return len(one) == len(other) and all(abs(a - b) < 1e-4 for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("path", ["chat", "text"])
def test_a_greedy_answer_goes_on_as_if_nothing_had_happened(talker, path):
    body = {"max_tokens": 40, "ignore_eos": True}
    ask = (
        (lambda e=None: talker.chat(extension=e, **body))
        if path == "chat"
        else (lambda e=None: talker.text(talker.encode("list it"), e, **body))
    )
    whole = ask()
    assert whole.status == 200 and whole.finish == "length" and len(whole.ids) == 40
    assert whole.note == PromptNote((len(whole.prompt), digest(whole.prompt)), False, 0, False)
    for cut in (1, 2, 17, 39, 40):
        got = ask(kept(whole.ids[:cut], whole.prompt))
        assert (got.ids, got.message, got.finish) == (whole.ids, whole.message, "length")
        assert got.prompt == whole.prompt
        assert close(got.logprobs[cut:], whole.logprobs[cut:]) and got.logprobs[:cut] == [0] * cut
        counts = ("prompt_tokens", "completion_tokens", "total_tokens")
        assert [got.usage[key] for key in counts] == [whole.usage[key] for key in counts]
        assert got.note == PromptNote((len(whole.prompt), digest(whole.prompt)), True, 0, False)


def test_what_was_cached_of_prompt_and_answer_is_counted(talker):
    messages = [{"role": "user", "content": "a" * 100}]
    whole = talker.chat(messages, max_tokens=300, ignore_eos=True)
    got = talker.chat(messages, kept(whole.ids[:299]), max_tokens=300, ignore_eos=True)
    assert (got.ids, got.message) == (whole.ids, whole.message)
    held = (len(whole.prompt) + 299) // 32 * 32  # whole blocks; the last token is never computed
    assert got.usage["prompt_tokens_details"]["cached_tokens"] == held


@pytest.mark.parametrize("text", [ANSWER, f"ok{CALL}\n{CALL.replace('run', 'read')}<|im_end|>"])
def test_a_parsed_answer_cut_anywhere_is_the_same_answer(talker, text):
    """At each place the engine is made to sample the one token that comes next."""
    ids = talker.pieces(text)
    whole = talker.chat(extension=kept(ids), max_tokens=200)
    assert whole.finish == "tool_calls" and whole.ids == ids
    assert json.loads(whole.calls[0]["arguments"]) == {"command": "ls", "n": 3}
    if "think" in text:
        assert whole.said["reasoning"].strip() == "hm, é" and whole.said["content"].strip() == "ok, I look."
    for cut in [*range(1, len(ids), 7), len(ids) - 1]:
        expected = talker.chat(extension=kept(ids[: cut + 1]), max_tokens=cut + 1)
        got = talker.chat(extension=kept(ids[:cut]), max_tokens=cut + 1, allowed_token_ids=[ids[cut]])
        assert (got.ids, got.message, got.finish) == (ids[: cut + 1], expected.message, expected.finish)
        assert got.usage["completion_tokens"] == cut + 1


def test_a_character_cut_in_its_middle_is_whole_in_the_text(talker):
    ids = talker.pieces("a é € 𝄞.")
    for cut in range(1, len(ids)):
        got = talker.text([65], kept(ids[:cut]), max_tokens=cut + 1, allowed_token_ids=[ids[cut]])
        assert got.ids == ids[: cut + 1]
        assert got.said["text"] == talker.text([65], kept(ids[: cut + 1]), max_tokens=cut + 1).said["text"]
    assert talker.text([65], kept(ids), max_tokens=len(ids)).said["text"] == "a é € 𝄞."


@pytest.mark.parametrize("included", [False, True])
def test_a_stop_string_cut_in_its_middle_stops(talker, included):
    ids = talker.pieces("one STOP")
    body = {"stop": ["STOP", "never"], "include_stop_str_in_output": included, "max_tokens": 20}
    for cut in range(4, len(ids)):
        got = talker.text([65], kept(ids[:cut]), allowed_token_ids=[ids[cut]], **{**body, "max_tokens": cut + 1})
        last = cut == len(ids) - 1
        assert (got.finish, got.stop) == (("stop", "STOP") if last else ("length", None))
        assert got.said["text"] == ("one " if last and not included else "one STOP"[: cut + 1])
    got = talker.text([65], kept([*ids, *ids]), **body)  # nothing beyond it is the answer's
    assert (got.ids, got.said["text"], got.stop) == (ids, "one STOP" if included else "one ", "STOP")


def test_known_tokens_that_end_an_answer_end_it(talker):
    before = talker.run(talker.process.status())["tokens"]
    ok = talker.encode("ok")
    got = talker.text([65], kept([*ok, talker.end, 65]), max_tokens=20)
    assert (got.ids, got.finish, got.said["text"]) == ([*ok, talker.end], "stop", "ok")
    got = talker.text([65], kept([*ok, 66, 65]), stop_token_ids=[66], max_tokens=20)
    assert (got.ids, got.finish, got.stop) == ([*ok, 66], "stop", 66)
    got = talker.text([65], kept([65, 65, 65]), max_tokens=2)
    assert (got.ids, got.finish) == ([65, 65], "length")
    room = CONTEXT - 600
    got = talker.text([65] * 600, kept([66] * 50), max_tokens=room)
    assert (len(got.ids), got.finish) == (room, "length")
    assert talker.run(talker.process.status())["tokens"] == before  # the core has done nothing


def test_the_least_number_of_tokens_counts_the_known_ones(talker):
    body = {"min_tokens": 10, "max_tokens": 20, "logit_bias": {str(talker.end): 100}}
    whole = talker.text([65], **body)
    assert whole.finish == "stop" and len(whole.ids) == 11
    for cut in (1, 9, 10):
        assert talker.text([65], kept(whole.ids[:cut]), **body).ids == whole.ids


def known(answer, texts):
    """The history that an answered call is for the next."""
    sequence = array("i", [*answer.prompt, *answer.ids])
    return Extension(history=History(sequence, len(answer.ids), answer.note.rendered, tuple(texts)))


def assistant(content, arguments=None, reasoning=None):
    call = {"id": "c1", "type": "function", "function": {"name": "run", "arguments": arguments}}
    message = {"role": "assistant", "content": content, "tool_calls": [call] if arguments else None}
    return {key: value for key, value in {**message, "reasoning": reasoning}.items() if value is not None}


def test_a_conversation_keeps_the_tokens_that_were_sampled(talker):
    """A call that the client serialises in its own way, reasoning that the template keeps until the user speaks."""
    one = talker.chat(extension=kept(talker.pieces(ANSWER)))
    said = assistant("ok, I look.", '{"n": 3,   "command": "ls"}', "hm, é")
    messages = [USER, said, {"role": "tool", "tool_call_id": "c1", "content": "aa"}]
    two = talker.chat(messages, known(one, ["hm, é", "ok, I look."]), max_tokens=4)
    tail = talker.encode("\n<|im_start|>tool\naa<|im_end|>\n<|im_start|>assistant\n")
    assert two.prompt == one.prompt + one.ids + tail
    rendered = talker.chat(messages, max_tokens=1).prompt
    assert two.note == PromptNote((len(rendered), digest(rendered)), True, two.note.drift, False) and two.note.drift > 0
    assert talker.tokenizer.decode(two.prompt) != talker.tokenizer.decode(rendered)  # the call, as it was written

    # The second answer was cut short by its limit; the third call's history is that of the second.
    said = two.said["content"]
    messages += [assistant(said), {"role": "tool", "tool_call_id": "c1", "content": "b"}]
    three = talker.chat(messages, known(two, [said]), max_tokens=1)
    tail = [talker.end, *talker.encode("\n<|im_start|>tool\nb<|im_end|>\n<|im_start|>assistant\n")]
    assert three.prompt == two.prompt + two.ids + tail
    assert three.note.spliced and three.note.drift >= two.note.drift

    # When the user speaks again the template forgets what was thought: the rendering is what the model sees.
    messages += [{"role": "user", "content": "more"}]
    four = talker.chat(messages, known(one, ["hm, é", "ok, I look."]), max_tokens=1)
    assert not four.note.spliced and four.note.drift == 0 and b"think" not in four.data
    assert four.prompt == talker.chat(messages, max_tokens=1).prompt


def test_the_same_tokens_again_are_no_drift(talker):
    one = talker.chat(extension=kept(talker.encode("ok aa<|im_end|>")))
    messages = [USER, assistant("ok aa"), USER]
    two = talker.chat(messages, known(one, ["ok aa"]), max_tokens=1, n=2, temperature=1)
    assert two.note.spliced and two.note.drift == 0
    assert two.prompt == talker.chat(messages, max_tokens=1).prompt
    drifted = talker.chat(
        messages, known(talker.chat(extension=kept([*talker.pieces("ok aa"), talker.end])), ["ok aa"])
    )
    assert drifted.note.spliced and drifted.note.drift == 5


@pytest.mark.parametrize(
    "body, constrained",
    [
        ({}, False),
        ({"temperature": 1, "top_p": 0.5, "logit_bias": {"5": 1.0}, "min_tokens": 1, "presence_penalty": 1}, False),
        ({"tools": STRICT}, True),  # not with every parser
        ({"tools": STRICT, "tool_choice": "none"}, False),
        ({"parallel_tool_calls": True}, False),
        ({"tools": STRICT, "tool_choice": "required"}, True),
        ({"tools": STRICT, "tool_choice": {"type": "function", "function": {"name": "run"}}}, True),
        ({"response_format": {"type": "text"}}, False),
        ({"response_format": {"type": "json_object"}}, True),
        ({"structured_outputs": {"regex": "a+"}}, True),
        ({"bad_words": ["no"]}, True),
        ({"vllm_xargs": {"a": 1}}, True),
    ],
)
def test_an_engine_says_whether_more_than_was_asked_for_shapes_what_it_samples(talker, body, constrained):
    got = talker.chat(max_tokens=2, **body)
    assert got.status == 200 and got.note.constrained is constrained


def test_given_tokens_are_the_prompt_whatever_is_rendered(talker):
    prompt = talker.encode("<|im_start|>user\nsomething else<|im_end|>\n<|im_start|>assistant\n")
    got = talker.chat(extension=Extension(prompt=array("i", prompt)), max_tokens=3)
    assert got.prompt == prompt and got.ids == talker.text(prompt, max_tokens=3).ids
    assert got.note.spliced and got.note.rendered[0] != len(prompt) and got.note.drift > 0


@pytest.mark.parametrize("length", [CONTEXT, CONTEXT + 1, 4 * CONTEXT])
def test_a_prompt_that_fills_the_context_is_a_clients_error(talker, length):
    given = Extension(prompt=array("i", [65] * length))
    content = "b" * (length - len(talker.encode("<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n")))
    asked = [
        talker.chat([{"role": "user", "content": content}], tools=None),
        talker.chat([{"role": "user", "content": content}], tools=None, max_tokens=5),
        talker.text([65] * length),
        talker.chat(extension=given),
        talker.text([65], given, max_tokens=3),
    ]
    assert [got.status for got in asked] == [400] * len(asked)
    assert all("maximum" in got.error["message"] or "max_tokens" in got.error["message"] for got in asked)
    for got in asked:
        error = errors.from_engine(400, got.data, CONTEXT)
        assert error.code == "context_length_exceeded" and error.context is not None, got.error
        assert CONTEXT <= error.context[0] <= length and error.context[1] == CONTEXT, "it stops counting at some length"
    assert errors.from_engine(400, asked[-1].data, CONTEXT).context == (length, CONTEXT)


def test_an_answer_that_fills_the_context_ends_with_its_length(talker):
    given = Extension(prompt=array("i", [65] * (CONTEXT - 3)))
    for got in (
        talker.text([65] * (CONTEXT - 3), max_tokens=3, ignore_eos=True),
        talker.chat(extension=given, ignore_eos=True),
        talker.chat(extension=given, max_tokens=50, min_tokens=20, ignore_eos=True),
        talker.text([65] * 10, given, max_tokens=600, ignore_eos=True),
        talker.chat([{"role": "user", "content": "b" * 590}], tools=None, max_tokens=600, ignore_eos=True),
    ):
        assert (got.status, got.finish) == (200, "length")
        assert len(got.prompt) + len(got.ids) == CONTEXT


@pytest.mark.parametrize(
    ("extension", "body"),
    [
        ("nonsense", {}),
        ('{"prompt": "AAA"}', {}),
        (Extension(prompt=array("i", [])).encode(), {}),
        (Extension(prompt=array("i", [5000])).encode(), {}),
        (kept([5000]).encode(), {}),
        (kept([65]).encode(), {"n": 2, "temperature": 1}),
        (7, {}),
    ],
)
def test_nonsense_is_a_clients_error(talker, extension, body):
    body = {"messages": [USER], "max_tokens": 2, "vllm_xargs": {"gyre": extension}, **body}
    got = talker.run(talker.ask(body))
    assert got.status == 400 and got.error["message"]
    assert talker.chat(max_tokens=1).status == 200


@pytest.mark.parametrize(
    "body",
    [
        *(b"{", b"", b"[]", b"7", b"\xff{}", b"[" * 100_000, b'{"messages": "x"}', b'{"messages": [7]}'),
        *({"max_tokens": -1}, {"max_tokens": 1.5}, {"temperature": "hot"}, {"temperature": -1}, {"top_p": 7}),
        *({"n": 0}, {"n": 10**9}, {"stop": [3]}, {"stop_token_ids": [-5]}, {"allowed_token_ids": [99999]}),
        *(
            {"logit_bias": {"99999": 1}},
            {"logit_bias": {"x": 1}},
            {"seed": "s"},
            {"tools": 5},
            {"tool_choice": "none of"},
        ),
        *({"structured_outputs": {"regex": "("}}, {"vllm_xargs": "x"}, {"messages": [{"role": "x" * 10**6}]}),
    ],
)
def test_bad_requests_are_the_clients_errors(talker, body):
    async def scenario():
        data = body if isinstance(body, bytes) else json.dumps({"messages": [USER], "stream": True, **body}).encode()
        headers = {**talker.headers(), "Content-Type": "application/json"}
        url = f"{talker.process.url}/v1/chat/completions"
        async with talker.session.post(url, data=data, headers=headers) as response:
            assert 400 <= response.status < 500, await response.text()
            answer = await response.json()
            assert answer["error"]["message"] if "error" in answer else answer["detail"]  # of what is no JSON at all

    talker.run(scenario())


def test_a_continued_answer_is_cancelled_like_another(talker):
    async def scenario():
        body = {"messages": [USER], "max_tokens": 500, "ignore_eos": True}
        before = (await talker.process.status())["tokens"]
        asked = [asyncio.ensure_future(talker.ask(body, kept([65] * n))) for n in (1, 30, 60)]
        while (await talker.process.status())["tokens"] < before + 20:
            await asyncio.sleep(0.01)
        assert await talker.process.hold() == 0
        await talker.process.admit(0)
        for answer in await asyncio.gather(*asked):
            assert answer.status == 409 or answer.data.endswith(b'data: {"moved": true}\n\n')

    talker.run(scenario())
