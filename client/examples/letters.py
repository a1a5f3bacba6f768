"""Problems in letters: prompts and answers, the tokenizer, and the verifier."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

import plexrl

LETTERS = "abcdefghijklmnopqrstuvwxyz"
VOCABULARY = "_" + LETTERS + ",=."  # token id 0 is never used; "." ends an answer


@dataclass(frozen=True)
class Problem:
    """A prompt and its only right answer."""

    prompt: str
    answer: str


def encode(text: str) -> list[int]:
    return [VOCABULARY.index(letter) for letter in text]


def decode(token_ids: Sequence[int] | np.ndarray) -> str:
    return "".join(VOCABULARY[token] if token < len(VOCABULARY) else "?" for token in token_ids)


def rewards(batch: Sequence[Problem], completions: plexrl.Completions, n: int) -> np.ndarray:
    """float32 [prompts, n]: 1 where the completion is the answer, letter by letter."""
    right = [decode(tokens) == batch[i // n].answer + "." for i, tokens in enumerate(completions.token_ids)]
    return np.array(right, np.float32).reshape(-1, n)
