"""A rollout that was cut anywhere, any number of times, is put together as it was."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plexrl import rollout_pieces
from plexrl.results import Completions
from plexrl.rollout_pieces import Piece, left, stitched

Row = tuple[list[int], str]
"""Tokens of a completion, and why it ended."""

rows = st.lists(
    st.tuples(st.lists(st.integers(0, 99), min_size=1, max_size=6), st.sampled_from(["stop", "length"])),
    min_size=1,
    max_size=12,
)


def completions(some: list[Row], *, scored: bool = True) -> Completions:
    """As a call returns them; a token's log-probability tells where it came from."""
    flat = np.array([token for ids, _ in some for token in ids], np.int32)
    scores = -flat.astype(np.float32) if scored else np.zeros(0, np.float32)
    return Completions(flat, np.array([len(ids) for ids, _ in some], np.int32), scores, tuple(r for _, r in some), 7)


def assert_equal(made: Completions, whole: list[Row], *, scored: bool = True) -> None:
    expected = completions(whole, scored=scored)
    assert made.flat_token_ids.tolist() == expected.flat_token_ids.tolist()
    assert made.flat_token_ids.dtype == made.lengths.dtype == np.int32
    assert made.lengths.tolist() == expected.lengths.tolist()
    assert made.flat_logprobs.tolist() == expected.flat_logprobs.tolist()
    assert made.flat_logprobs.dtype == np.float32
    assert made.finish_reasons == expected.finish_reasons


@given(data=st.data(), whole=rows, scored=st.booleans())
def test_what_is_cut_is_left_goes_on_and_comes_together(data: st.DataObject, whole: list[Row], scored: bool) -> None:
    """Cuts at any length, 0 among them; some of the parts leave nothing, some everything."""
    parts = sorted(data.draw(st.sets(st.integers(1, len(whole)), max_size=3)) | {len(whole)})
    pieces: list[Piece] = []
    begin = 0
    for end in parts:
        numbers = range(begin, end)
        cut = [data.draw(st.integers(0, len(whole[number][0]))) for number in numbers]
        begun: list[Row] = [
            (whole[number][0][:at], "unfinished") if at < len(whole[number][0]) else whole[number]
            for number, at in zip(numbers, cut, strict=True)
        ]
        prompts = [[1000 + number] * (number % 3 + 1) for number in numbers]
        pieces.append((numbers, completions(begun, scored=scored)))
        rests = left(prompts, numbers, pieces[-1][1], max_tokens=10)
        going = [number for rest in rests for number in rest.numbers]
        assert sorted(going) == [n for n, row in zip(numbers, begun, strict=True) if row[1] == "unfinished"]
        for rest in rests:
            for number, prompt in zip(rest.numbers, rest.prompts, strict=True):
                so_far = cut[number - begin]
                assert prompt.tolist() == prompts[number - begin] + whole[number][0][:so_far]
                assert rest.max_tokens == 10 - so_far
            own = [(whole[n][0][cut[n - begin] :], whole[n][1]) for n in rest.numbers]
            pieces.append((rest.numbers, completions(own, scored=scored)))
        begin = end
    made = stitched(len(whole), pieces, weights_version=3)
    assert_equal(made, whole, scored=scored)
    assert made.weights_version == 3


def test_calls_that_go_on_are_no_larger_than_a_call_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_pieces, "MAX_REST_TOKENS", 10)
    begun = completions([([1, 2], "unfinished")] * 4 + [([1], "unfinished"), ([1, 2], "stop")])
    prompts = [[9] * size for size in (2, 4, 1, 20, 1, 1)]
    rests = left(prompts, range(6), begun, max_tokens=5)
    assert [(rest.numbers, rest.max_tokens) for rest in rests] == [((0, 1), 3), ((2,), 3), ((3,), 3), ((4,), 4)]
