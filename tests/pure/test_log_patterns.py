"""The data file of known log lines: every entry holds its example, in bounded time, and speaks."""

from __future__ import annotations

import ast
import io
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from metainfer.doctor.finding import Level
from metainfer.doctor.logs.lines import LINE_BYTES
from metainfer.doctor.logs.pattern import Bound, During, load_known
from metainfer.doctor.logs.scan import scan

ROOT = Path(__file__).parents[2]
KNOWN = load_known()
IDS = [pattern.id for pattern in KNOWN.patterns]
each = pytest.mark.parametrize("pattern", KNOWN.patterns, ids=IDS)
READY = next(ready for engine in KNOWN.engines for ready in engine.ready)


def ids_in(text: str) -> dict[str, int]:
    """Id -> how many lines of `text` are of that kind."""
    report = scan(io.BytesIO(text.encode()), KNOWN)
    return {sighting.pattern.id: sighting.count for sighting in report.sightings}


@each
def test_an_example_is_found_and_explained(pattern):
    before = READY if pattern.during is During.SERVING else "nothing"
    report = scan(io.BytesIO("\n".join([before] + [pattern.example] * 3).encode()), KNOWN)
    (sighting,) = [one for one in report.sightings if one.pattern is pattern]
    finding = sighting.finding()
    assert (sighting.count, sighting.first_line) == (3, 2)
    for text in (finding.what, finding.matters, finding.fix):
        assert not re.search(r"[{}]", text), text
        assert not text.endswith(".") and text == text.strip()
    assert finding.what and finding.source and finding.evidence.startswith("line 2, 3 such lines")
    if pattern.level is not Level.OK:
        assert finding.matters and finding.fix


def test_ids_are_unique_and_no_two_entries_say_the_same_of_a_line():
    assert len(set(IDS)) == len(IDS) > 80
    assert len({pattern.regex.pattern + pattern.during for pattern in KNOWN.patterns}) == len(IDS)


@each
def test_a_regex_does_not_try_a_repetition_at_every_place_of_a_long_word(pattern):
    """Lines go up to 64 KB, some of them of letters alone: what begins with a repetition begins
    where a word does."""
    repeated = r"(\((\?:|\?P<\w+>)?)*(\\[wSdDWs]|\.|\[\^?[^\]]*\])[*+{]"
    assert re.match(repeated, pattern.regex.pattern) is None


@each
def test_a_regex_takes_bounded_time_at_every_place(pattern):
    parsed = re._parser.parse(pattern.regex.pattern)
    wide = list(_repeats(parsed, within=False))
    assert len(wide) <= 2, "at most two repeats of more than 40"
    assert len(pattern.needle) >= 4 and pattern.needle in pattern.example


def _repeats(parsed, *, within: bool) -> Iterator[int]:
    """The largest counts of wide repeats; fails where one lies within another or has no end."""
    for op, args in parsed:
        name = str(op)
        if name in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
            _, most, inner = args
            repeats = most > 1
            assert most <= 800, "a repeat without end"
            assert not (within and repeats), "a repeat within a repeat"
            if most > 40 and str(inner[0][0]) in ("ANY", "NOT_LITERAL"):
                yield most
            yield from _repeats(inner, within=within or repeats)
        elif name == "SUBPATTERN":
            yield from _repeats(args[-1], within=within)
        elif name == "BRANCH":
            for branch in args[1]:
                yield from _repeats(branch, within=within)
        elif name in ("ASSERT", "ASSERT_NOT"):
            yield from _repeats(args[1], within=within)
        else:
            assert name in ("LITERAL", "NOT_LITERAL", "IN", "ANY", "AT", "CATEGORY"), name


@each
def test_lines_that_nearly_match_for_ever_are_refused_or_found(pattern):
    example = pattern.example
    for part in (example[: len(example) // 2], example[:-1], pattern.needle):
        line = part * (LINE_BYTES // len(part))
        assert pattern.match(line) is None or pattern.needle in line


def test_a_line_that_names_torch_s_error_first_still_says_how_much_was_asked_for():
    (pattern,) = [one for one in KNOWN.patterns if one.id == "cuda-out-of-memory"]
    report = scan(io.BytesIO(pattern.example.encode()), KNOWN)
    (sighting,) = [one for one in report.sightings if one.pattern is pattern]
    assert "2.00 GiB" in sighting.finding().what
    bare = "RuntimeError: CUDA error: out of memory"
    assert ids_in(bare) == {"cuda-out-of-memory": 1}


def test_advice_to_give_a_flag_is_not_the_flag():
    line = (
        "WARNING [custom_all_reduce.py:135] Custom allreduce is disabled because it's not supported"
        " on more than two PCIe-only GPUs. To silence this warning, specify"
        " disable_custom_all_reduce=True explicitly."
    )
    assert ids_in(line) == {"allreduce-pcie": 1}


def test_every_warning_of_this_engine_is_known():
    unknown = [line for line in own_warnings() if not ids_in(line)]
    assert not unknown, f"add entries to doctor/data/log_patterns.toml for: {unknown}"


def own_warnings() -> Iterator[str]:
    """Lines as `core/log.py` writes them, of all warnings and errors in the package."""
    for path in sorted((ROOT / "metainfer").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT / "metainfer").with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(
                    ast.Attribute(ast.Name("_log" | "logger"), "warning" | "error" | "exception"),
                    [ast.Constant(str(message)), *_],
                ):
                    if message == "%s":
                        continue  # a sentence that is made elsewhere
                    text = message.replace("%d", "7").replace("%s", "word").replace("%r", "word")
                    yield f"10:00:00 warning {module}: {text}"


def test_own_warnings_are_there_to_be_tested():
    assert len(list(own_warnings())) >= 7


def test_bounds_compare_numbers_and_fields_and_what_is_no_number_never_holds():
    fields = {"a": "1,234", "b": "2000", "c": "?", "d": "-0.5"}
    assert Bound("a", above=1233).holds(fields) and Bound("a", below="b").holds(fields)
    assert not Bound("b", below="a").holds(fields) and Bound("d", below=0).holds(fields)
    for bound in (Bound("c", above=0), Bound("x", above=0), Bound("a", below="c")):
        assert not bound.holds(fields)
