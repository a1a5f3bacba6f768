"""Training batches: where weights, advantages and old log-probabilities land."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import plexrl
from plexrl.results import Completions


def completions(token_ids: list[list[int]]) -> Completions:
    flat = np.array([token for tokens in token_ids for token in tokens], np.int32)
    lengths = np.array([len(tokens) for tokens in token_ids], np.int32)
    return Completions(flat, lengths, -flat.astype(np.float32), ("stop",) * len(token_ids), 0)


def test_values_lie_on_completion_tokens_only() -> None:
    batch = plexrl.TrainingBatch.from_completions(
        [[1, 2], [3]], completions([[10], [11, 12], [13], []]), [1.0, 2.0, 3.0, 4.0]
    )
    assert batch.token_ids.tolist() == [1, 2, 10, 1, 2, 11, 12, 3, 13, 3]
    assert batch.lengths.tolist() == [3, 4, 2, 1]
    assert batch.weights.tolist() == pytest.approx([0, 0, 0.25, 0, 0, 0.25, 0.25, 0, 0.25, 0])
    assert batch.advantages is not None
    assert batch.old_logprobs is not None
    assert batch.advantages.tolist() == [0, 0, 1, 0, 0, 2, 2, 0, 3, 0]
    assert batch.old_logprobs.tolist() == [0, 0, -10, 0, 0, -11, -12, 0, -13, 0]
    assert [view.tolist() for view in batch.split(batch.advantages)] == [[0, 0, 1], [0, 0, 2, 2], [0, 3], [0]]


def test_sequence_weights_give_each_completion_the_same() -> None:
    batch = plexrl.TrainingBatch.from_targets([[1], [2]], [[5], [6, 7, 8, 9]], normalise="sequence")
    assert batch.weights.tolist() == pytest.approx([0, 0.5, 0, 0.125, 0.125, 0.125, 0.125])


def test_a_number_is_every_tokens_weight() -> None:
    batch = plexrl.TrainingBatch.from_targets([[1]], [[5, 6]], normalise=0.01)
    assert batch.weights.tolist() == pytest.approx([0, 0.01, 0.01])


def test_reference_logprobs_are_spread_too() -> None:
    reference = [np.array([-1.0], np.float32), np.array([-2.0, -3.0], np.float32)]
    batch = plexrl.TrainingBatch.from_completions([[1]], completions([[4], [5, 6]]), [1, 1], ref_logprobs=reference)
    assert batch.ref_logprobs is not None
    assert batch.ref_logprobs.tolist() == [0, -1, 0, -2, -3]


@pytest.mark.parametrize(
    ("prompts", "advantages", "message"),
    [([[1], [2]], [1.0], "multiple"), ([[1]], [1.0, 2.0], "advantages"), ([[]], [1.0], "prompt"), ([], [], "multiple")],
)
def test_what_does_not_fit_is_refused(prompts: list[list[int]], advantages: list[float], message: str) -> None:
    with pytest.raises(plexrl.InvalidArgument, match=message):
        plexrl.TrainingBatch.from_completions(prompts, completions([[7]]), advantages)


@given(
    st.lists(
        st.tuples(st.lists(st.integers(1, 50), min_size=1, max_size=5), st.lists(st.integers(1, 50), max_size=6)),
        min_size=1,
        max_size=8,
    ).filter(lambda pairs: any(target for _, target in pairs)),
)
def test_the_first_token_of_a_sequence_never_has_weight(pairs: list[tuple[list[int], list[int]]]) -> None:
    batch = plexrl.TrainingBatch.from_targets([p for p, _ in pairs], [t for _, t in pairs])
    assert [list(s) for s in batch.sequences] == [p + t for p, t in pairs]
    assert all(weights[0] == 0 for weights in batch.split(batch.weights))
    assert batch.weights.sum() == pytest.approx(1.0, abs=1e-5)
