from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.core.sampling_params import SamplingParams
from jaxinfer.core.stop import StopChecker, banned_until_min_tokens


def feed(pieces, **params):
    checker = StopChecker(SamplingParams(max_tokens=None, **params))
    delivered = []
    for number, piece in enumerate(pieces, 1):
        text, stop = checker.push(piece, number)
        delivered.append(text)
        if stop is not None:
            return delivered, stop
    return [*delivered, checker.finish()], None


def first_stop(pieces, stops, include, min_tokens):
    """Looks at every prefix of the whole text."""
    text = "".join(pieces)
    settled = len("".join(pieces[:min_tokens]))
    for end in range(settled + 1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return (text[:end] if include else text[: end - len(stop)]), stop
    return text, None


TEXTS = st.text("ab ", max_size=4)


@settings(max_examples=600)
@given(
    st.lists(TEXTS, max_size=10),
    st.lists(st.text("ab ", min_size=1, max_size=5), max_size=3),
    st.booleans(),
    st.integers(0, 4),
)
def test_text_ends_at_the_first_complete_stop_however_it_is_cut(pieces, stops, include, min_tokens):
    delivered, stop = feed(pieces, stop=stops, include_stop_str_in_output=include, min_tokens=min_tokens)
    assert ("".join(delivered), stop) == first_stop(pieces, stops, include, min_tokens)


@settings(max_examples=300)
@given(st.lists(TEXTS, max_size=10), st.lists(st.text("ab ", min_size=1, max_size=5), min_size=1, max_size=3))
def test_only_what_could_become_a_stop_string_is_held_back(pieces, stops):
    delivered, stop = feed(pieces, stop=stops)
    so_far = ""
    for number, piece in enumerate(pieces[: len(delivered) - 1]):
        so_far += piece
        held = so_far[len("".join(delivered[: number + 1])) :]
        ended = stop is not None and number == len(delivered) - 1
        assert ended or not held or any(candidate.startswith(held) for candidate in stops)


def test_examples():
    assert feed(["ple", "as"], stop="assistant") == (["ple", "", "as"], None)
    assert feed(["The", " quick", " brown", " own", " fo", "x!"], stop=" own fox")[0][:3] == ["The", " quick", " brown"]
    assert feed(["aXbY"], stop=["Y", "X"]) == (["a"], "X")
    assert feed(["aab"], stop="ab") == (["a"], "ab")


@pytest.mark.parametrize(("min_tokens", "banned"), [(0, ()), (3, (7, 8, 9))])
def test_ids_banned_until_min_tokens(min_tokens, banned):
    params = SamplingParams(min_tokens=min_tokens, stop_token_ids=[9, 7], ignore_eos=True)
    assert banned_until_min_tokens(params, (7, 8)) == banned
