"""A rollout in pieces: what a call left of its completions, and the whole put together again. Pure numpy."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from plexrl.batch import Tokens
from plexrl.results import Completions
from plexrl.wire import Float32Array, Int32Array

MAX_REST_TOKENS = 1 << 20
"""Prompts of one call that goes on with what was left, together; a single longer one is a call of its own."""

Piece = tuple[Sequence[int], Completions]
"""Some completions of a rollout, by their numbers in it, and what was sampled of each."""


@dataclass(frozen=True)
class Rest:
    """Completions that may have as many tokens more: their numbers in the rollout, and what they go on from."""

    numbers: tuple[int, ...]
    prompts: tuple[Int32Array, ...]
    max_tokens: int


def left(prompts: Sequence[Tokens], numbers: Sequence[int], begun: Completions, max_tokens: int) -> list[Rest]:
    """What is unfinished of completions: a call each for those that are equally far.

    prompts, numbers: of each completion, the prompt that it began with and its number in the rollout.
    """
    by_length: dict[int, list[tuple[int, Int32Array]]] = {}
    for prompt, number, ids, reason in zip(prompts, numbers, begun.token_ids, begun.finish_reasons, strict=True):
        if reason == "unfinished":
            whole = np.concatenate([np.asarray(prompt, np.int32), ids])
            by_length.setdefault(len(ids), []).append((number, whole))
    rests: list[Rest] = []
    for length, together in by_length.items():
        some: list[tuple[int, Int32Array]] = []
        for number, whole in together:
            if some and sum(len(earlier) for _, earlier in some) + len(whole) > MAX_REST_TOKENS:
                rests.append(_rest(some, max_tokens - length))
                some = []
            some.append((number, whole))
        rests.append(_rest(some, max_tokens - length))
    return rests


def _rest(some: Sequence[tuple[int, Int32Array]], max_tokens: int) -> Rest:
    return Rest(tuple(number for number, _ in some), tuple(whole for _, whole in some), max_tokens)


def stitched(total: int, pieces: Sequence[Piece], weights_version: int) -> Completions:
    """One rollout of its pieces: of each completion its pieces one after the other, and why the last one ended.

    total: completions of the rollout; every number below it is in at least one piece.
    """
    ids: list[list[Int32Array]] = [[] for _ in range(total)]
    scores: list[list[Float32Array]] = [[] for _ in range(total)]
    reasons = [""] * total
    for numbers, completions in pieces:
        scored = completions.logprobs if completions.flat_logprobs.size else [np.zeros(0, np.float32)] * len(numbers)
        rows = zip(numbers, completions.token_ids, scored, completions.finish_reasons, strict=True)
        for number, own_ids, own_scores, reason in rows:
            ids[number].append(own_ids)
            scores[number].append(own_scores)
            reasons[number] = reason
    return Completions(
        flat_token_ids=np.concatenate([part for parts in ids for part in parts]),
        lengths=np.array([sum(map(len, parts)) for parts in ids], np.int32),
        flat_logprobs=np.concatenate([part for parts in scores for part in parts]),
        finish_reasons=tuple(reasons),
        weights_version=weights_version,
    )
