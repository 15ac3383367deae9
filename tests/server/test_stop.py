"""Stop strings over token boundaries."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dynamictp.server.stop import StopScanner, StopSet

ALPHABET = "abé🙂"
texts = st.text(ALPHABET, max_size=40)
stop_lists = st.lists(st.text(ALPHABET, min_size=1, max_size=5), max_size=5)


def cut_at_first_stop(text: str, stops: list[str], *, include: bool) -> tuple[str, bool]:
    """The plain definition: the stop string that ends first; of several, the longest."""
    found = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    if not found:
        return text, False
    end, start = min(found)
    return text[: end if include else start], True


@given(text=texts, stops=stop_lists, include=st.booleans(), data=st.data())
def test_output_is_the_text_cut_at_the_first_stop(
    text: str, stops: list[str], include: bool, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=10)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    scanner = StopScanner(StopSet(stops), include=include)
    expected, stopped = cut_at_first_stop(text, stops, include=include)
    out = ""
    for piece in pieces:
        out += scanner.push(piece)
        assert expected.startswith(out), "part of a stop string leaked"
    out += scanner.flush()
    assert (out, scanner.matched) == (expected, stopped)


@given(text=texts, stops=stop_lists)
def test_nothing_is_held_back_that_can_not_become_a_stop(text: str, stops: list[str]) -> None:
    scanner = StopScanner(StopSet(stops))
    out = scanner.push(text)
    if not scanner.matched:
        held = text[len(out) :]
        longest = max(
            (n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0
        )
        assert len(held) == longest


def test_a_stop_inside_another_ends_first() -> None:
    scanner = StopScanner(StopSet(["abcd", "bc"]))
    assert scanner.push("xab") == "x"
    assert scanner.push("cd") == "a"
    assert scanner.matched
    assert scanner.push("more") == ""
