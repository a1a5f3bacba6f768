"""A generate that is inside vLLM: what has ended of it, how far the rest is, and when it is over.

Reads what vLLM keeps of a request that has not ended: private fields of its output processor (pinned;
`tests/e2e/test_engine_vllm.py` would notice).
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import Tokenizer

from plexrl_worker.engine.port import ConcurrentGenerate, FinishReason, Generation

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.llm_engine import LLMEngine

# A stop string is looked for in the text of this many tokens more than it has characters.
_STOP_MARGIN_TOKENS = 8

Completion = tuple[list[int], list[float], FinishReason]
"""Token ids, log-probabilities, and why it ended."""


@dataclass
class Sampled:
    """A generate that gave way: what has ended of it, and the requests that have not."""

    model: str
    version: int
    request_ids: list[str]
    finished: dict[int, Completion]
    """By the number of the completion."""
    scheduled_ids: set[str] = field(default_factory=set)
    """What the scheduler knows the requests by: it adds something of its own to the ids that it was given."""
    running: list[Any] = field(default_factory=list)
    waiting: list[Any] = field(default_factory=list)


@dataclass
class Execution:
    """A generate whose requests the engine has."""

    generate: ConcurrentGenerate
    sampled: Sampled

    @property
    def name(self) -> str:
        """What the ids of its requests begin with."""
        return self.sampled.request_ids[0].rpartition("-")[0]

    @property
    def finished(self) -> dict[int, Completion]:
        """Completions that have ended, by their number."""
        return self.sampled.finished

    @property
    def total(self) -> int:
        """Completions in all."""
        return len(self.sampled.request_ids)

    @property
    def over(self) -> bool:
        """Whether no more is to be sampled: as few are unfinished as it may leave."""
        return self.total - len(self.finished) <= self.generate.params.leave

    def note(self, engine: "LLMEngine", output: "RequestOutput", tokenizer: Tokenizer | None) -> None:
        """Takes what a step says of one of its requests; one that a stop string ends leaves the engine."""
        number, completion = _number(output.request_id), output.outputs[0]
        stopped_at = _stop_string_end(completion.token_ids, self.generate.params.stop, tokenizer)
        if stopped_at is not None:
            engine.abort_request([output.request_id])
            ids = list(completion.token_ids[:stopped_at])
            self.finished[number] = (ids, _logprobs(completion, len(ids)), FinishReason.STOP)
        elif output.finished:
            ids = list(completion.token_ids)
            reason = FinishReason.STOP if completion.finish_reason == "stop" else FinishReason.LENGTH
            self.finished[number] = (ids, _logprobs(completion, len(ids)), reason)

    def conclude(self, engine: "LLMEngine") -> Generation:
        """The whole, of one that is over; what is unfinished leaves the engine, as far as it is."""
        completions = self.finished | self._left(engine)
        engine.abort_request([name for name in self.sampled.request_ids if _number(name) not in self.finished])
        ordered = [completions[number] for number in range(self.total)]
        wanted = self.generate.params.logprobs
        logprobs = [score for _, scores, _ in ordered for score in scores] if wanted else []
        return Generation(
            token_ids=np.array([token for ids, _, _ in ordered for token in ids], np.int32),
            lengths=np.array([len(ids) for ids, _, _ in ordered], np.int32),
            logprobs=np.array(logprobs, np.float32),
            finish_reasons=tuple(reason for _, _, reason in ordered),
            weights_version=self.sampled.version,
        )

    def _left(self, engine: "LLMEngine") -> dict[int, Completion]:
        """What is unfinished. Private: vLLM shows a request's tokens when it has ended, or at every step."""
        left: dict[int, Completion] = {}
        if len(self.finished) == self.total:
            return left
        for scheduled_id in self.sampled.scheduled_ids:
            state: Any = engine.output_processor.request_states.get(scheduled_id)
            if state is not None:
                ids = list(state.detokenizer.output_token_ids)
                scores = _logprobs(state.logprobs_processor, len(ids))
                left[_number(state.external_req_id)] = (ids, scores, FinishReason.UNFINISHED)
        return left


def _number(request_id: str) -> int:
    """The number of the completion that a request samples."""
    return int(request_id.rpartition("-")[2])


def _logprobs(completion: Any, count: int) -> list[float]:
    """Log-probabilities of the first `count` sampled tokens; a position's first entry is the sampled token's."""
    flat = completion.logprobs
    return [] if flat is None else [flat.logprobs[start] for start in flat.start_indices[:count]]


def _stop_string_end(token_ids: Any, stop: tuple[str, ...], tokenizer: Tokenizer | None) -> int | None:
    """Tokens up to the one that completes the first stop string; None if there is none.

    The outputs come token by token, so only the newest token can complete one: the text's end is looked at.
    """
    if not stop or tokenizer is None or not token_ids:
        return None
    tail = list(token_ids)[-(max(map(len, stop)) + _STOP_MARGIN_TOKENS) :]
    text = tokenizer.decode(tail, skip_special_tokens=False)
    return len(token_ids) if any(word in text for word in stop) else None
