"""Language models that answer: one served through PlexRL, or any OpenAI-compatible endpoint.

Knows messages and tokens; knows nothing of waiting.
"""

import threading
from dataclasses import dataclass
from typing import Protocol

import httpx

import plexrl
from plexrl import errors


@dataclass(frozen=True)
class Reply:
    """A model's answer and what it took."""

    text: str
    prompt_tokens: int
    completion_tokens: int


class Chat(Protocol):
    """Anything that answers a system and a user message."""

    def complete(self, system: str, user: str, opening: str, stop: tuple[str, ...]) -> Reply:
        """`opening`: how the answer begins, for models that need a hand; the reply's text comes after it."""
        ...


class OpenAICompatible:
    """`POST {base_url}/chat/completions`, as vLLM, llama.cpp, Ollama and hosted services speak it.

    base_url ends in /v1. api_key: sent as a bearer token; empty sends none.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key: str = "",
        max_tokens: int = 300,
        temperature: float = 0.0,
        timeout_s: float = 120.0,
    ) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = httpx.Client(base_url=base_url.rstrip("/"), headers=headers, timeout=timeout_s)
        self._model, self._max_tokens, self._temperature = model, max_tokens, temperature

    def complete(self, system: str, user: str, opening: str, stop: tuple[str, ...]) -> Reply:
        """Raises plexrl.errors.Unavailable with what the endpoint said."""
        messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
        if opening:
            messages.append({"role": "assistant", "content": opening})
        body: dict[str, object] = {
            "model": self._model,
            "messages": messages,
            "max_tokens": self._max_tokens,
            "temperature": self._temperature,
        }
        if stop:
            body["stop"] = list(stop)
        try:
            response = self._client.post("/chat/completions", json=body)
            response.raise_for_status()
            answer = response.json()
            usage = answer.get("usage") or {}
            text = answer["choices"][0]["message"]["content"] or ""
            return Reply(text, int(usage.get("prompt_tokens", 0)), int(usage.get("completion_tokens", 0)))
        except httpx.HTTPStatusError as error:
            said = f"{error.response.status_code} {error.response.text[:300]}"
            raise errors.Unavailable(f"{error.request.url} answered {said}") from None
        except httpx.HTTPError as error:
            raise errors.Unavailable(f"{self._client.base_url}: {error}") from None
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise errors.Unavailable(f"{self._client.base_url} gave no chat completion: {error!r}") from None

    def close(self) -> None:
        self._client.close()


class ThroughPlexRL:
    """A model of a PlexRL job. ChatML, as SmolLM2 and many others are trained on.

    With `together` = n, n agents in n threads ask at a time and one `generate` answers them all; each says `leave` when
    it asks no more.
    """

    def __init__(
        self,
        model: plexrl.Model,
        *,
        max_tokens: int = 200,
        temperature: float = 0.0,
        seed: int = 0,
        together: int = 1,
    ) -> None:
        self._model, self._max_tokens, self._temperature, self._seed = model, max_tokens, temperature, seed
        self._calls = 0
        self._asking = together
        self._turn = threading.Condition()
        self._waiting: list[_Question] = []

    def complete(self, system: str, user: str, opening: str, stop: tuple[str, ...]) -> Reply:
        """Raises what `generate` raises, in every thread that asked."""
        text = (
            f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{user}<|im_end|>\n"
            f"<|im_start|>assistant\n{opening}"
        )
        question = _Question(text, (*stop, "<|im_end|>"))
        with self._turn:
            self._waiting.append(question)
            self._answer_if_all_asked()
            self._turn.wait_for(lambda: question.reply is not None or question.error is not None)
        if question.error is not None:
            raise question.error
        assert question.reply is not None
        return question.reply

    def leave(self) -> None:
        """One agent fewer asks."""
        with self._turn:
            self._asking -= 1
            self._answer_if_all_asked()

    def _answer_if_all_asked(self) -> None:
        if not self._waiting or len(self._waiting) < self._asking:
            return
        questions, self._waiting = self._waiting, []
        try:
            self._answer(questions)
        except errors.PlexRLError as error:
            for question in questions:
                question.error = error
        self._turn.notify_all()

    def _answer(self, questions: list["_Question"]) -> None:
        prompts = self._model.tokenize([question.text for question in questions])
        self._calls += 1
        tokens = self._model.generate(
            prompts,
            max_tokens=self._max_tokens,
            temperature=self._temperature,
            stop=sorted({mark for question in questions for mark in question.stop}),
            seed=self._seed + self._calls,
        ).token_ids
        texts = self._model.detokenize(tokens)
        for question, prompt, text, made in zip(questions, prompts, texts, tokens, strict=True):
            for mark in question.stop:
                text = text.partition(mark)[0]
            question.reply = Reply(text, len(prompt), len(made))


@dataclass
class _Question:
    text: str
    stop: tuple[str, ...]
    reply: Reply | None = None
    error: errors.PlexRLError | None = None
