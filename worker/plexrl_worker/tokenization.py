"""Text to token ids and back with a model's tokenizer.json. Blocks: call it from a thread. Needs no torch."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from plexrl.v1 import model_pb2 as m
from plexrl.wire import batch_arrays, split, token_batch
from plexrl_worker.errors import InvalidOrder

_MAX_TEXTS = 4096


def tokenize(tokenizer_file: Path, request: m.TokenizeRequest) -> m.TokenizeResponse:
    """Token ids of each text. Raises InvalidOrder."""
    _check_count("texts", len(request.texts))
    encodings = _load(tokenizer_file).encode_batch(list(request.texts), add_special_tokens=request.add_special_tokens)
    return m.TokenizeResponse(batch=token_batch([encoding.ids for encoding in encodings]))


def detokenize(tokenizer_file: Path, request: m.DetokenizeRequest) -> m.DetokenizeResponse:
    """Text of each sequence. Raises InvalidOrder, WireError."""
    token_ids, lengths = batch_arrays(request.batch, min_length=0)
    _check_count("batch", lengths.size)
    if token_ids.size and int(token_ids.min()) < 0:
        raise InvalidOrder(f"batch.token_ids: {int(token_ids.min())} is negative")
    sequences: Sequence[list[int]] = [np.asarray(ids).tolist() for ids in split(token_ids, lengths)]
    texts = _load(tokenizer_file).decode_batch(sequences, skip_special_tokens=request.skip_special_tokens)
    return m.DetokenizeResponse(texts=texts)


def _check_count(name: str, count: int) -> None:
    if count > _MAX_TEXTS:
        raise InvalidOrder(f"{name}: {count} of them, the limit is {_MAX_TEXTS}")


@lru_cache(maxsize=16)
def _load(tokenizer_file: Path) -> Any:
    try:
        return Tokenizer.from_file(str(tokenizer_file))
    except Exception as error:
        raise InvalidOrder(f"{tokenizer_file.name} cannot be read: {error}") from error
