"""A job that learns to interleave two words of 2 to 4 letters. Start a cluster with `plexrl up`, then run this file."""

import random

import plexrl
from examples import grpo
from examples.letters import LETTERS, Problem

# A Qwen3 of about 300,000 parameters.
CONFIG: dict[str, object] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 32,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 100.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}


def draw(draws: random.Random) -> Problem:
    length = draws.randint(2, 4)
    first, second = ("".join(draws.choices(LETTERS, k=length)) for _ in range(2))
    return Problem(f"{first},{second}=", "".join(a + b for a, b in zip(first, second, strict=True)))


TASK = grpo.Task("interleave", CONFIG, draw, max_tokens=10)


def main() -> None:
    settings = grpo.Settings()
    with plexrl.connect() as cluster, cluster.job(TASK.name) as job:
        policy = job.model("policy", base=plexrl.Init(TASK.config, seed=settings.seed))
        print("imitation steps:", grpo.imitate(policy, TASK, settings))
        before = grpo.evaluate(policy, TASK, settings)
        grpo.reinforce(job, policy, TASK, settings, on_step=print)
        print(f"held-out answers right: {before:.2f} before, {grpo.evaluate(policy, TASK, settings):.2f} after")


if __name__ == "__main__":
    main()
