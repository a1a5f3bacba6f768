"""Agents that are language models: the prompt in, the model's code out.

Knows prompts and chats; knows nothing of episodes.
"""

import re

from plexrl.waiting.agents.chat import Chat
from plexrl.waiting.agents.interface import Action, History, Observation
from plexrl.waiting.agents.prompts import HistoryBlock, system, user

_FENCE = re.compile(r"```(?:python|py)?[^\S\n]*\n(.*?)(?:```|\Z)", re.DOTALL)


class LanguageModel:
    """Asks a chat model for each action.

    guided: for small models, that cannot be relied on for code: the answer is begun for them up to `time.sleep(`, only
    what they put there is taken, and the same sleep is repeated until the operation is seen to have finished. What is
    not a number is passed on as it is and ends as an error that the model sees.
    """

    def __init__(
        self, chat: Chat, *, block: HistoryBlock = HistoryBlock.FULL, guided: bool = False, name: str = "llm"
    ) -> None:
        self.name = f"{name}-{block}"
        self._chat = chat
        self._block = block
        self._guided = guided

    def act(self, observation: Observation, history: History) -> Action:
        """One question, one answer."""
        records = history.get(observation.operation.name, ())
        asked = (system(observation), user(observation, records, self._block))
        if not self._guided:
            reply = self._chat.complete(*asked, "", ())
            return Action(code_of(reply.text), reply.prompt_tokens, reply.completion_tokens)
        start = "" if observation.elapsed_s is not None else observation.operation.start + "\n"
        opening = f"```python\n{start}time.sleep("
        reply = self._chat.complete(*asked, opening, (")", "\n"))
        sleep = f"time.sleep({reply.text.strip()})"
        code = f"{start}{sleep}\nwhile not {observation.operation.look}:\n    {sleep}"
        return Action(code, reply.prompt_tokens, reply.completion_tokens)


def code_of(text: str) -> str:
    """The first code block of an answer; all of it if it has none."""
    found = _FENCE.search(text)
    return found.group(1) if found else text
