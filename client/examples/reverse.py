"""A job that learns to write 4 to 7 letters backwards. Start a cluster with `plexrl up`, then run this file."""

import random

import plexrl
from examples import grpo
from examples.letters import LETTERS, Problem

# A Llama of about 300,000 parameters.
CONFIG: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
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
    word = "".join(draws.choices(LETTERS, k=draws.randint(4, 7)))
    return Problem(f"{word}=", word[::-1])


TASK = grpo.Task("reverse", CONFIG, draw, max_tokens=9)


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
