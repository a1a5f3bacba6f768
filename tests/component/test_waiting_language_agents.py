"""Language models as agents: what they are told, and what is made of their answers."""

import json
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

import plexrl
from plexrl import errors
from plexrl.waiting.agents.chat import OpenAICompatible, ThroughPlexRL
from plexrl.waiting.agents.interface import Observation, Record
from plexrl.waiting.agents.language import LanguageModel, code_of
from plexrl.waiting.agents.prompts import HistoryBlock, history_block, system, user
from plexrl.waiting.episodes import MAX_TURNS, End, Run
from plexrl.waiting.sandbox import Sandbox
from plexrl.waiting.scenarios import SCENARIOS

RECORDS = [
    Record(0, (20.0, 10.0), 2, ((20.0, False), (30.0, True)), 20.0, 30.0, exact_s=24.5),
    Record(1, (600.0,), 1, (), 600.0, float("inf"), exact_s=float("inf")),
]
OPERATION = SCENARIOS["gamma-16"].operations[0]
OBSERVATION = Observation(OPERATION, SCENARIOS["gamma-16"].costs, 2, 0, None, (), "", "", "kubectl.get(kind, name)")


def test_the_history_block_and_its_ablations() -> None:
    full = history_block(RECORDS, HistoryBlock.FULL)
    assert "it took between 20.0 and 30.0 s; slept 20.0 s, then 10.0 s; 2 queries, not finished at 20.0 s" in full
    assert "finished at 30.0 s" in full
    assert "more than 600.0 s" in full
    intervals = history_block(RECORDS, HistoryBlock.INTERVALS)
    assert "between 20.0 and 30.0 s" in intervals
    assert "slept" not in intervals
    assert "it took 24.5 s" in history_block(RECORDS, HistoryBlock.EXACT)
    assert history_block(RECORDS, HistoryBlock.NONE) == ""
    for block in (HistoryBlock.FULL, HistoryBlock.INTERVALS, HistoryBlock.NONE):
        assert "24.5" not in history_block(RECORDS, block)


def test_exact_times_are_only_told_where_the_experiment_gives_them_away() -> None:
    with pytest.raises(ValueError, match="exact_history"):
        history_block([Record(0, (), 1, (), 0.0, 5.0)], HistoryBlock.EXACT)


def test_the_prompt_holds_task_tools_prices_and_what_was_seen() -> None:
    assert 'kubectl.apply("deployment", "web")' in system(OBSERVATION)
    assert "kubectl.get(kind, name)" in system(OBSERVATION)
    assert "costs 5" in system(OBSERVATION)
    running = Observation(
        OPERATION, OBSERVATION.costs, 2, 1, 21.0, ((21.0, False),), "False\n", "syntax: expected a name", ""
    )
    told = user(running, RECORDS, HistoryBlock.FULL)
    for part in (
        "Started 21.0 s ago",
        "After 21.0 s: not finished",
        "printed: False",
        "stopped: syntax",
        "between 20.0",
    ):
        assert part in told


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ("```python\nx = 1\n```", "x = 1\n"),
        ("Sure!\n```py\nx = 1\n```\nDone.", "x = 1\n"),
        ("```\nx = 1", "x = 1"),
        ("x = 1", "x = 1"),
        ("", ""),
    ],
)
def test_code_is_taken_from_answers(answer: str, code: str) -> None:
    assert code_of(answer) == code


Model = Callable[[list[dict[str, str]]], str]


class Endpoint:
    """A local server that speaks chat completions, with a function in place of a model."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.fail_with: tuple[int, bytes] | None = None
        self.url = ""

    @contextmanager
    def running(self) -> Iterator["Endpoint"]:
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                endpoint.requests.append({"path": self.path, **body})
                endpoint.keys.append(self.headers.get("Authorization", ""))
                status, answer = endpoint.fail_with or (200, endpoint.answer(body["messages"]))
                self.send_response(status)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it so
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        self.url = f"http://127.0.0.1:{server.server_port}/v1"
        try:
            yield self
        finally:
            server.shutdown()
            thread.join()
            server.server_close()

    def answer(self, messages: list[dict[str, str]]) -> bytes:
        said = self.model(messages)
        usage = {"prompt_tokens": sum(len(m["content"]) for m in messages) // 4, "completion_tokens": len(said) // 4}
        return json.dumps({"choices": [{"message": {"role": "assistant", "content": said}}], "usage": usage}).encode()


def reads_history(messages: list[dict[str, str]]) -> str:
    """Sleeps for what the history suggests, else for two seconds; five seconds more after a look in vain."""
    asked = messages[1]["content"]
    ends = [float(end) for end in re.findall(r"between [\d.]+ and ([\d.]+) s", asked)]
    start = "" if "Started" in asked else f"{OPERATION.start}\n"
    sleep_s = (float(np.mean(ends)) if ends else 2.0) if start else 5.0
    return f"```python\n{start}time.sleep({sleep_s})\nprint({OPERATION.look})\n```"


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox() as made:
        yield made


def mean_cost(block: HistoryBlock, sandbox: Sandbox, episodes: int = 6) -> float:
    with Endpoint(reads_history).running() as endpoint:
        chat = OpenAICompatible(endpoint.url, "double", api_key="a key")
        scenario = SCENARIOS["gamma-16"]
        run = Run(
            type(scenario)(scenario.name, scenario.operations[:1], scenario.costs),
            LanguageModel(chat, block=block),
            sandbox,
            seed=0,
            exact_history=block is HistoryBlock.EXACT,
        )
        scores = [run.run_episode()[0] for _ in range(episodes)]
        chat.close()
    assert all(score.end is End.DETECTED for score in scores)
    assert all(score.prompt_tokens > 100 * score.turns for score in scores)
    assert endpoint.requests[0]["path"] == "/v1/chat/completions"
    assert set(endpoint.keys) == {"Bearer a key"}
    return float(np.mean([score.cost for score in scores[1:]]))


def test_an_endpoints_model_that_reads_its_history_waits_better(sandbox: Sandbox) -> None:
    without = mean_cost(HistoryBlock.NONE, sandbox)
    assert mean_cost(HistoryBlock.FULL, sandbox) < without / 2
    assert mean_cost(HistoryBlock.INTERVALS, sandbox) < without / 2


def test_prose_is_an_observation(sandbox: Sandbox) -> None:
    def model(messages: list[dict[str, str]]) -> str:
        return reads_history(messages) if "was stopped" in messages[1]["content"] else "I would rather not."

    with Endpoint(model).running() as endpoint:
        chat = OpenAICompatible(endpoint.url, "double")
        score = Run(SCENARIOS["gamma-16"], LanguageModel(chat), sandbox, seed=0).run_episode()[0]
        chat.close()
    assert score.complaints[0] == "syntax"
    assert score.end is End.DETECTED
    assert set(endpoint.keys) == {""}


@pytest.mark.parametrize(
    ("failure", "complaint"),
    [
        ((500, b"out of memory"), "500 out of memory"),
        ((200, b"<html>"), "no chat completion"),
        ((200, b"{}"), "no chat"),
    ],
)
def test_an_endpoint_that_fails_says_so(failure: tuple[int, bytes], complaint: str) -> None:
    with Endpoint(reads_history).running() as endpoint:
        endpoint.fail_with = failure
        chat = OpenAICompatible(endpoint.url, "double")
        with pytest.raises(errors.Unavailable, match=complaint):
            chat.complete("s", "u", "", ())
        chat.close()
    chat = OpenAICompatible(endpoint.url, "double", timeout_s=2)
    with pytest.raises(errors.Unavailable, match="Connection refused"):
        chat.complete("s", "u", "", ())
    chat.close()


class Letters:
    """Stands for a plexrl.Model with one token per character; answers what it is told to."""

    def __init__(self, answer: str) -> None:
        self.answer = answer
        self.prompts: list[str] = []

    def tokenize(self, texts: list[str]) -> list[list[int]]:
        self.prompts += texts
        return [[ord(letter) for letter in text] for text in texts]

    def generate(self, prompts: Sequence[Sequence[int]], **settings: object) -> SimpleNamespace:
        return SimpleNamespace(token_ids=[[ord(letter) for letter in self.answer]])

    def detokenize(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        return ["".join(map(chr, sequence)) for sequence in sequences]


def test_a_small_model_is_guided_through_plexrl(sandbox: Sandbox) -> None:
    model = Letters("31.5)\nprint(")
    agent = LanguageModel(ThroughPlexRL(cast("plexrl.Model", model)), guided=True)
    action = agent.act(OBSERVATION, {"apply": RECORDS})
    again = f"while not {OPERATION.look}:\n    time.sleep(31.5)"
    assert action.code == f"{OPERATION.start}\ntime.sleep(31.5)\n{again}"
    assert model.prompts[0].endswith(f"<|im_start|>assistant\n```python\n{OPERATION.start}\ntime.sleep(")
    assert (action.prompt_tokens, action.completion_tokens) == (len(model.prompts[0]), len(model.answer))
    score = Run(SCENARIOS["gamma-16"], agent, sandbox, seed=0).run_episode()[0]
    assert set(score.sleeps_s) == {31.5}


def test_what_is_no_number_is_seen_as_a_stop(sandbox: Sandbox) -> None:
    agent = LanguageModel(ThroughPlexRL(cast("plexrl.Model", Letters("a while"))), guided=True)
    score = Run(SCENARIOS["gamma-16"], agent, sandbox, seed=0).run_episode()[0]
    assert set(score.complaints) == {"syntax"}
    assert score.end is End.GAVE_UP
    assert score.queries == MAX_TURNS + 1
