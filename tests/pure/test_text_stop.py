"""Stop strings: found wherever the text is cut, nothing lost, nothing shown too early."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from metainfer.text.stop import StopMatcher, held_back

# Few letters, so that stops overlap with themselves and with each other.
texts = st.text("abc", max_size=30)
stop_lists = st.lists(st.text("abc", min_size=1, max_size=5), max_size=4)


def cut(text: str, data: st.DataObject) -> list[str]:
    """The text in random pieces, some of them empty."""
    ends = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=10)))
    return [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]


def first_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    """By definition: the shortest prefix of `text` that ends with a stop, and the longest such."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return end, max(found, key=len)
    return None


@given(texts, stop_lists, st.booleans(), st.data())
def test_any_cut_gives_what_the_definition_says(
    text: str, stops: list[str], include: bool, data: st.DataObject
) -> None:
    matcher = StopMatcher(stops, include)
    shown = "".join(matcher.push(piece) for piece in cut(text, data))
    shown += matcher.finish()
    expected = first_stop(text, stops)
    if expected is None:
        assert matcher.matched is None and shown == text
    else:
        end, stop = expected
        assert matcher.matched == stop
        assert shown == text[: end if include else end - len(stop)]


@given(texts, stop_lists)
def test_no_more_is_held_back_than_needed(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = ""
    for character in text:
        shown += matcher.push(character)
        if matcher.matched is not None:
            return
    held = text[len(shown) :]
    assert held == "" or any(stop.startswith(held) for stop in stops)


def test_held_back_is_the_longest_beginning_of_a_marker() -> None:
    assert held_back("one <｜DS", ["<｜DSML｜"]) == 4
    assert held_back("aab", ["aabc", "bb"]) == 3
    assert held_back("xyz", ["abc"]) == 0
    assert held_back("abc", ["abc"]) == 0  # complete: no longer a matter of waiting


def test_nothing_comes_after_a_match() -> None:
    matcher = StopMatcher(["STOP"])
    assert matcher.push("go ST") == "go "
    assert matcher.push("OP and more") == ""
    assert matcher.matched == "STOP"
    assert matcher.push("more") == matcher.finish() == ""


def test_without_stops_all_passes() -> None:
    matcher = StopMatcher(())
    assert matcher.push("anything") == "anything"
