"""Tokens to text: stop strings and characters over token boundaries, whatever the tokens are."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dynamictp.messages import ServedBy, TokenEvent
from dynamictp.server.choice import Choice, TextRules
from dynamictp.server.live_request import Ended
from dynamictp.server.stop import StopSet
from tests.server.server_stack import EOS, byte_tokenizer

TOKENIZER = byte_tokenizer()


def make_choice(stops: list[str], min_tokens: int = 0) -> Choice:
    rules = TextRules(StopSet(stops), frozenset({EOS}), min_tokens, 1000, False, True)
    return Choice("r", TOKENIZER, rules, wake=lambda: None, wake_on_token=True)


def event(position: int, token: int, attempt: int = 1, served: ServedBy | None = None) -> TokenEvent:
    return TokenEvent("r", attempt, position, token, served or ServedBy("d1", 1, 1, 1))


def read(choice: Choice) -> str:
    delta = choice.take()
    return delta.text if delta is not None else ""


@given(
    text=st.text("abé🙂", max_size=20),
    stops=st.lists(st.text("abé🙂", min_size=1, max_size=3), max_size=3),
    data=st.data(),
)
def test_text_is_cut_at_the_first_stop_and_never_leaks(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    choice = make_choice(stops)
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    expected = text[: min(ends)[1]] if ends else text
    out = ""
    for position, token in enumerate([*text.encode(), EOS]):
        done = choice.on_token(event(position, token))
        if data.draw(st.booleans()):
            out += read(choice)
            assert expected.startswith(out)
        if done:
            break
    else:
        choice.on_end(Ended("stop"))
    out += read(choice)
    assert out == expected
    assert choice.finish_reason == "stop"
    assert choice.take() is None


@given(text=st.text("ab", min_size=4, max_size=12), least=st.integers(0, 12))
def test_text_of_the_first_tokens_is_no_part_of_a_stop_string(text: str, least: int) -> None:
    choice = make_choice(["ab"], min_tokens=least)
    for position, token in enumerate(text.encode()):
        if choice.on_token(event(position, token)):
            break
    else:
        choice.on_end(Ended("length"))
    found = text.find("ab", least)
    assert read(choice) == (text if found < 0 else text[:found])


def test_an_end_token_before_min_tokens_does_not_count() -> None:
    choice = make_choice([], min_tokens=2)
    for position, token in enumerate([EOS, ord("a"), EOS]):
        choice.on_token(event(position, token))
    choice.on_end(Ended("stop"))
    assert read(choice) == "a"
    assert choice.completion_tokens == 3


def test_a_restart_of_the_engine_adds_to_what_the_request_went_through() -> None:
    choice = make_choice([])
    choice.on_token(event(0, 97, 1, ServedBy("d1", 2, 1, 2, handovers=1)))
    choice.on_token(event(1, 98, 2, ServedBy("d5", 3, 3, 3, recomputes=1)))
    assert choice.served == ServedBy("d5", 3, 1, 3, handovers=1, recomputes=2)
