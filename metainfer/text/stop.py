"""Stop strings in streamed text, wherever the pieces are cut."""

from __future__ import annotations

from collections.abc import Sequence


def held_back(text: str, markers: Sequence[str]) -> int:
    """How many characters at the end of `text` may be the beginning of a marker.

    The length of the longest suffix of `text` that is a proper prefix of one of `markers`.
    """
    longest = 0
    for marker in markers:
        for length in range(min(len(marker) - 1, len(text)), longest, -1):
            if text.endswith(marker[:length]):
                longest = length
                break
    return longest


class StopMatcher:
    """Lets text through until a stop string is complete.

    The stop string that is complete first wins; of those that end at the same character, the
    longest. The outcome does not depend on how the text was cut into pieces.

    Args:
        stops: the stop strings, none of them empty.
        include: let the stop string itself through too.

    Attributes:
        matched: the stop string that was found, or None so far.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        assert all(stops), "stop strings are not empty"
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that can no longer belong to a stop string. Nothing after a match."""
        if self.matched is not None or not text:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        found = [(text.find(stop) + len(stop), -len(stop), stop) for stop in self._stops]
        found = [match for match in found if match[0] + match[1] >= 0]
        if found:
            end, _, self.matched = min(found)
            self._held = ""
            return text[: end if self._include else end - len(self.matched)]
        keep = held_back(text, self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What was held back, once it is clear that nothing follows."""
        text, self._held = self._held, ""
        return text
