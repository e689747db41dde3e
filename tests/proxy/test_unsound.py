"""Engines that fail, or whose words are no answer: another try, and after many a lost request with its reason."""

import json

import pytest

from tests.proxy.fake_engine import UNSOUND, FakeEngine, Fault
from tests.proxy.plain import ASK, TEXT, TOKENS, check_record, run
from tests.proxy.stand import stand, text_of


def test_server_errors_for_ever_are_a_lost_request(tmp_path, monkeypatch):
    monkeypatch.setattr("gyre.proxy.relay.MAX_FAILURES", 3)

    async def scenario():
        engine = FakeEngine(0, faults=[Fault("500")] * 9)
        async with stand(tmp_path, engine) as it:
            status, reply = await it.ask(ASK)
            assert status == 502 and reply["error"]["code"] == "engine_failed"
            assert (await it.proxy.close(1, 1))["lost"] == 1

    run(scenario())


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("cut", [0, 6])
@pytest.mark.parametrize("how", [*UNSOUND, "nan", "error", "drop"])
def test_an_engine_that_never_answers_soundly_is_a_lost_request_with_its_reason(
    tmp_path, monkeypatch, how, cut, streaming
):
    monkeypatch.setattr("gyre.proxy.relay.MAX_FAILURES", 3)
    if how == "no tokens" and cut:
        pytest.skip("the end of a text may come after the last token")

    async def scenario():
        engine = FakeEngine(0, faults=[Fault(how, cut), *[Fault(how)] * 9])
        async with stand(tmp_path, engine) as it:
            if streaming:
                events, _ = await it.ask_stream(ASK)
                error = events[-1]["error"]
                assert TEXT.startswith(text_of(events[:-1]))
            else:
                status, reply = await it.ask(ASK)
                error = reply["error"]
                assert status == 502
            assert error["code"] == "engine_failed" and "engine 0" in error["message"]
            assert len(engine.bodies) == 3 + (cut > 0)
            counts = await it.proxy.close(1, 1)
            assert counts["lost"] == 1 and counts["fault"] == error["message"]
        records = it.records()
        assert [record.sampled.tolist() for record in records] == ([TOKENS[:cut]] if cut else [])
        assert not any(record.trainable for record in records)

    run(scenario())


def test_a_request_that_engines_die_of_is_not_sent_to_all_of_them(tmp_path):
    async def scenario():
        engine = FakeEngine(0, faults=[Fault("drop")] * 9)
        async with stand(tmp_path, engine) as it:
            status, reply = await it.ask(ASK)
            assert status == 502 and reply["error"]["code"] == "engine_failed"
            assert len(engine.bodies) == 3
            engine.faults = [Fault("drop", cut) for cut in (0, 3, 6, 6, 9, 9)]
            assert (await it.ask(ASK))[0] == 200, "with a token in between they die of something else"
            assert (await it.proxy.close(1, 1))["lost"] == 1

    run(scenario())


@pytest.mark.parametrize("how", sorted(UNSOUND.keys() - {"no tokens"}))
def test_an_engine_that_errs_once_is_asked_again(tmp_path, how):
    async def scenario():
        async with stand(tmp_path, FakeEngine(0, faults=[Fault(how, 3)])) as it:
            assert (await it.ask(ASK))[1]["choices"][0]["message"]["content"] == TEXT
            counts = await it.proxy.close(1, 1)
            assert counts["lost"] == 0 and counts["fault"] == ""
        check_record(it.records()[0])

    run(scenario())


def test_moves_between_unsound_answers_and_answers_that_start_over_do_not_go_on_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr("gyre.proxy.relay.MAX_FAILURES", 4)

    async def scenario():
        faults = [Fault("no logprobs"), Fault("refused")] * 9
        async with stand(tmp_path, FakeEngine(0, faults=faults)) as it:
            assert (await it.ask(ASK))[0] == 502
        faults = [Fault("error", 2 + turn % 3) for turn in range(40)]  # never as far as it has been
        async with stand(tmp_path, FakeEngine(0, faults=faults)) as it:
            assert (await it.ask({**ASK, "presence_penalty": 0.5}))[0] == 502

    run(scenario())


def test_an_engine_that_cannot_be_reached_counts_as_no_failure(tmp_path, monkeypatch):
    monkeypatch.setattr("gyre.proxy.relay.MAX_FAILURES", 2)

    async def scenario():
        engine = FakeEngine(0)
        async with stand(tmp_path, engine, request_timeout=1.0) as it:
            await engine.stop()
            status, reply = await it.ask(ASK)
            assert status == 504 and reply["error"]["message"] == "no engine answered in 1 s"
            await engine.start()

    run(scenario())


@pytest.mark.parametrize("how", ["500", "400", "in the stream", "refused in the stream"])
def test_an_engines_words_are_not_logged(tmp_path, caplog, monkeypatch, how):
    """They may quote what a client sent."""
    monkeypatch.setattr("gyre.proxy.relay.MAX_FAILURES", 2)
    caplog.set_level("DEBUG")
    word = "so it is"
    stream = {"in the stream": 500, "refused in the stream": 422}.get(how)
    if stream:
        said = {"error": {"message": word, "type": f"Bad {word}", "code": stream}}
        monkeypatch.setitem(UNSOUND, how, json.dumps(said).encode())

    async def scenario():
        first = FakeEngine(0, faults=[Fault("moved", 3), *[Fault(how, 0)] * 9])
        async with stand(tmp_path, first) as it:
            status, reply = await it.ask(ASK)
            counts = await it.proxy.close(1, 1)
        assert status == 502 and word not in json.dumps(reply) and word not in counts["fault"]
        assert word not in caplog.text and str(stream or how) in caplog.text
        assert ("Bad)" in caplog.text) == (stream is None)

    run(scenario())
