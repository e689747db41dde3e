"""Known tokens in a rendering: where they are put, and where the rendering wins."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.splice import Extension, History, PromptNote, digest, drift, pack, resolve, splice, unpack

START, END = 1, 2
SPECIAL = {START: "<s>", END: "<e>"}
ALPHABET = "ab{ }:\n"
PIECES = [*ALPHABET, *(a + b for a in ALPHABET for b in ALPHABET)]  # every two characters may be one token
VOCABULARY = {piece: index + 10 for index, piece in enumerate(PIECES)}
TEXTS = {**{index: piece for piece, index in VOCABULARY.items()}, **SPECIAL}
TEXT = st.text(ALPHABET, max_size=8)


def decode(ids):
    return "".join(TEXTS[i] for i in ids)


def encode(text):
    """As an encoder does it: the longest piece first."""
    ids = []
    while text:
        size = 2 if text[:2] in VOCABULARY else 1
        ids.append(VOCABULARY[text[:size]])
        text = text[size:]
    return ids


def turn(text):
    return [START, *encode(text), END, *encode("\n")]


def render(texts, prompt=True):
    """A chat template of turns; the generation prompt is one special token and a line feed, which may merge."""
    out = []
    for text in texts:
        out += [START, *encode("\n" + text), END, *encode("\n")]
    return out + ([START, *encode("\n")] if prompt else [])


@st.composite
def segmented(draw):
    """Sampled ids: a text in any pieces, not only an encoder's."""
    ids = []
    for _ in range(draw(st.integers(0, 6))):
        ids.append(VOCABULARY[draw(st.sampled_from(PIECES))])
    return ids


def known(conversation, prompt, answer, texts=()):
    rendered = render(conversation)
    return History(array("i", [*prompt, *answer]), len(answer), (len(rendered), digest(rendered)), texts)


@given(st.lists(TEXT, min_size=1, max_size=3), st.lists(st.tuples(segmented(), TEXT, st.booleans()), max_size=5))
def test_a_conversation_stays_what_was_sampled(first, turns):
    texts, prompt, seen = list(first), array("i", render(first)), []
    for sampled, reply, ended in turns:
        answer = sampled + [END] * ended
        history = known(texts, prompt, answer, texts=(decode(sampled),))
        seen = [*prompt, *answer]
        texts += [decode(sampled), reply]
        rendered = render(texts)
        prompt, note = resolve(rendered, Extension(history=history), {END}, decode)
        assert note.spliced and note.rendered == (len(rendered), digest(rendered))
        assert list(prompt[: len(seen)]) == seen
        assert decode(prompt) == decode(rendered)
        assert (note.drift == 0) == (list(prompt) == rendered)
        assert note.drift <= max(len(prompt), len(rendered))


def test_a_reformatted_call_is_the_sampled_one():
    texts, sampled = ["a"], [VOCABULARY["{"], VOCABULARY["a"], VOCABULARY[":"], VOCABULARY["b"], VOCABULARY["}"]]
    history = known(texts, render(texts), [*sampled, END])
    rendered = render(["a", "{ a : b }", "b"])
    prompt, note = resolve(rendered, Extension(history=history), {END}, decode)
    assert list(prompt) == [*render(texts), *sampled, END, *encode("\n"), *render(["b"])]
    assert note.spliced and note.drift == 6


def test_a_template_that_drops_reasoning_wins():
    history = known(["a"], render(["a"]), [*encode("bb:a"), END], texts=("bb", "a"))
    rendered = render(["a", "a", "b"])
    prompt, note = resolve(rendered, Extension(history=history), {END}, decode)
    assert list(prompt) == rendered and not note.spliced and note.drift == 0


def test_texts_are_found_one_after_the_other_and_stripped():
    history = known(["a"], render(["a"]), [*encode("ab"), END], texts=(" a\n", "a"))
    assert splice(render(["a", "a"]), history, {END}, decode) is None
    assert splice(render(["a", "aa"]), history, {END}, decode) is not None


@pytest.mark.parametrize(
    "said, texts, again, whole",
    [
        ("{b}aa:ab", ("b",), "{ b }aa:ab", True),
        ("{b}aa:ab", ("b",), "{\n b } aa : ab", True),
        ("{b}aa:ab", ("b",), "aa:ab", False),  # the reasoning is gone, and its words are a call's
        ("{b}aa:ab", ("b",), " aa : ab", False),
        ("{b}a:ab", ("b", "a"), "{b} a : ab", True),
        ("{b}a:ab", ("b", "a"), "{b} : ab", False),  # the content is gone
        ("{ab}", ("b", "b"), "{a b } b", True),  # not as it was said: only the order tells
    ],
)
def test_words_that_come_behind_more_than_they_did_are_others(said, texts, again, whole):
    history = known(["a"], render(["a"]), [*encode(said), END], texts=texts)
    assert (splice(render(["a", again]), history, {END}, decode) is not None) is whole


@pytest.mark.parametrize("rendered", [[], render(["b", "ab", "b"]), render(["a"])[:-1], render(["a"])])
def test_another_beginning_is_no_history(rendered):
    history = known(["a"], render(["a"]), [*encode("ab"), END], texts=("ab",))
    assert splice(rendered, history, {END}, decode) is None


def test_an_answer_cut_short_is_ended_by_the_template():
    history = known(["a"], render(["a"]), [VOCABULARY["a"], VOCABULARY["b"]], texts=("ab",))
    prompt = splice(render(["a", "ab", "b"]), history, {END}, decode)
    assert list(prompt) == [*render(["a"]), VOCABULARY["a"], VOCABULARY["b"], END, *encode("\n"), *render(["b"])]


def test_without_tokens_that_end_turns_the_text_tells():
    sampled = [VOCABULARY["a"], VOCABULARY["b"]]
    first = encode("a:")
    history = History(array("i", [*first, *sampled]), 2, (len(first), digest(first)))
    prompt = splice(first + encode("ab\n:b"), history, set(), decode)
    assert list(prompt) == [*first, *sampled, *encode("\n:b")]
    assert splice(first + encode("aa\n:b"), history, set(), decode) is None
    assert splice(first + encode("a") + [VOCABULARY["b\n"]], history, set(), decode) is None  # not between tokens


def test_a_later_turns_end_is_not_the_answers():
    """Where only other turns end in a token, what stands before it is not all the answer's."""
    sampled = [VOCABULARY["a"], VOCABULARY["b"]]
    first = [*encode("a"), END]
    history = History(array("i", [*first, *sampled]), 2, (len(first), digest(first)), ("ab",))
    prompt = splice([*first, *encode("ab:b"), END], history, {END}, decode)
    assert list(prompt) == [*first, *sampled, *encode(":b"), END]


def test_given_ids_stand_whatever_was_rendered():
    rendered = render(["a"])
    prompt, note = resolve(rendered, Extension(prompt=array("i", [START, 12])), {END}, decode)
    assert list(prompt) == [START, 12] and note.spliced and note.rendered == (len(rendered), digest(rendered))
    prompt, note = resolve(rendered, Extension(), {END}, decode)
    assert list(prompt) == rendered and not note.spliced


def test_drift_counts_each_turn_by_itself():
    one, other = encode("ababab"), [*map(VOCABULARY.get, "ababab")]
    same = turn("bbbb")
    assert drift([*one, END, *same, *one, END], [*other, END, *same, *other, END], {END}) == 12
    assert drift([10, 11], [10, 12, 11], {END}) == 1
    assert drift([10, END, 11, END], [10, 11, END], {END}) == 1


IDS = st.lists(st.integers(0, 2**31 - 1), max_size=5).map(lambda ids: array("i", ids))


@given(IDS, IDS, st.none() | IDS, st.lists(st.text(), max_size=3))
def test_the_wire_carries_it_all(sequence, kept, prompt, texts):
    history = History(sequence, len(sequence) // 2, (len(sequence), digest(sequence)), tuple(texts))
    for extension in (Extension(prompt, kept, history), Extension(prompt, kept), Extension()):
        assert Extension.decode(extension.encode()) == extension
    for constrained in (None, False, True):
        note = PromptNote((3, digest(sequence)), bool(kept), len(kept), constrained)
        assert PromptNote.decode(note.encode()) == note
    assert unpack(pack(sequence)) == sequence


@pytest.mark.parametrize(
    "text",
    [
        *(
            "[" * 100_000,
            "",
            "[]",
            "null",
            "{",
            '{"unknown": 1}',
            '{"prompt": 3}',
            '{"prompt": null}',
            '{"kept": "AAA"}',
        ),
        *('{"kept": "AAAA"}', '{"kept": "/////w=="}', '{"history": 1}', '{"history": {}}', '{"history": {"more": 1}}'),
        '{"history": {"sequence": "", "answer": 1, "rendered": [0, ""]}}',
        '{"history": {"sequence": "", "answer": 0, "rendered": [0, 1]}}',
        '{"history": {"sequence": "", "answer": 0, "rendered": [-1, ""]}}',
        '{"history": {"sequence": "", "answer": 0, "rendered": [0, ""], "texts": [1]}}',
        '{"history": {"sequence": "", "answer": true, "rendered": [0, ""]}}',
    ],
)
def test_nonsense_is_refused(text):
    with pytest.raises(ValueError):
        Extension.decode(text)


NOTE = '{"rendered": [0, ""], "spliced": true, "drift": 0, "constrained": 1}'


@pytest.mark.parametrize("text", ["", "{}", '{"rendered": [0, ""], "spliced": 1, "drift": 0}', NOTE])
def test_a_note_of_nonsense_is_refused(text):
    with pytest.raises(ValueError):
        PromptNote.decode(text)


@given(st.text() | st.binary().map(str))
def test_any_text_is_an_extension_or_a_value_error(text):
    try:
        Extension.decode(text)
    except ValueError:
        pass
