"""`plexrl waiting`: agents that learn to wait, measured against the best that is possible.

The flags are known to the base install; what runs is imported when it runs and needs the extra `waiting`.
"""

import argparse
import importlib
import os
from pathlib import Path
from typing import Any

from plexrl import errors
from plexrl.cli import options


def add_parser(subparsers: options.Subparsers) -> None:
    """Adds `waiting` and its commands."""
    parser = subparsers.add_parser(
        "waiting",
        help="learning to wait: benchmark agents that predict how long operations take",
        description="Agents that start operations and predict how long to sleep, rather than block or poll. Needs the "
        "extra `waiting` (pip install 'plexrl[waiting]').",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_bench(commands)
    _add_run(commands)
    _add_learn(commands)
    _add_serve(commands)
    _add_latency(commands)
    _add_llm(commands)


def _add_bench(commands: options.Subparsers) -> None:
    parser = commands.add_parser(
        "bench",
        help="agents times laws: a table, learning curves, report.json",
        description="Every agent waits for the same operations under every law, episode after episode. Writes "
        "report.json, rows.csv and curves.png.",
    )
    parser.add_argument("--out", type=Path, default=Path("out/waiting"), metavar="DIR", help="default: out/waiting")
    parser.add_argument(
        "--laws", default="", metavar="A,B", help="default: all but those of the cluster (cluster/calm, ...)"
    )
    parser.add_argument("--agents", default="", metavar="A,B", help="default: all")
    parser.add_argument("--episodes", type=_positive, default=60, help="per agent, law and seed (default: 60)")
    parser.add_argument("--seeds", type=_positive, default=3, help="default: 3")
    parser.add_argument("--processes", type=_positive, default=2, help="default: 2")
    parser.set_defaults(run=_bench)


def _add_run(commands: options.Subparsers) -> None:
    parser = commands.add_parser("run", help="watch one agent wait", description="Tells an agent's episodes live.")
    parser.add_argument("--agent", default="empirical", help="default: empirical")
    parser.add_argument(
        "--law", default="gamma-4", help="or cluster/calm for the simulated Kubernetes cluster; default: gamma-4"
    )
    parser.add_argument("--episodes", type=_positive, default=3, help="default: 3")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    parser.add_argument(
        "--speed", type=_speed, default=30.0, help="seconds of the clock per second (default: 30; inf: at once)"
    )
    group = parser.add_argument_group("a language model as the agent, instead of --agent")
    group.add_argument("--chat-url", metavar="URL", help="OpenAI-compatible endpoint, e.g. http://127.0.0.1:8000/v1")
    group.add_argument("--chat-model", metavar="NAME", help="the model's name there")
    group.add_argument(
        "--history",
        choices=("none", "full", "intervals", "exact"),
        default="full",
        help="what it is told; default: full",
    )
    parser.set_defaults(run=_run)


def _add_learn(commands: options.Subparsers) -> None:
    parser = commands.add_parser(
        "learn",
        help="a small model learns to wait, as an RLVR job",
        description="Starts a cluster of one worker and trains a model of 300,000 parameters by GRPO on what its waits "
        "cost, once per seed. Writes report.json and learned.png.",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("out/waiting-learned"), metavar="DIR", help="default: out/waiting-learned"
    )
    parser.add_argument("--seeds", type=_positive, default=3, help="how many; default: 3")
    parser.add_argument("--first-seed", type=_natural, default=0, metavar="SEED", help="default: 0")
    parser.add_argument(
        "--alone", action="store_true", help="one after the other, each on a cluster of its own, not all at once"
    )
    parser.set_defaults(run=_learn)


def _add_serve(commands: options.Subparsers) -> None:
    parser = commands.add_parser(
        "serve",
        help="a simulated Kubernetes cluster, for kubectl and friends",
        description="Serves a simulated Kubernetes cluster on 127.0.0.1 until it is interrupted. Prints where the "
        "kubeconfig is; only its owner can read it.",
    )
    _add_preset(parser)
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same latencies (default: 0)")
    parser.add_argument(
        "--speed", type=float, default=1.0, help="how fast time passes; 0: only when a client asks for it (default: 1)"
    )
    parser.add_argument("--port", type=int, default=0, help="default: a free one")
    parser.add_argument(
        "--dir", type=Path, default=Path(".plexrl/waiting"), metavar="DIR", help="default: .plexrl/waiting"
    )
    parser.add_argument("--log", type=Path, metavar="FILE", help="write every change there, one JSON line each")
    parser.set_defaults(run=_serve)


def _add_latency(commands: options.Subparsers) -> None:
    parser = commands.add_parser(
        "latency",
        help="simulated nodes for a real cluster: their pods start as slowly as a preset says",
        description="Adds nodes without machines to the cluster of a kubeconfig, and starts, readies, ends and stops "
        "the pods on them in the time of a preset. Other nodes and their pods are left alone. Runs until interrupted; "
        "the nodes stay, to be deleted with kubectl.",
    )
    parser.add_argument("--kubeconfig", type=Path, required=True, metavar="FILE")
    _add_preset(parser)
    parser.add_argument("--nodes", type=_positive, default=3, help="default: 3")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    parser.set_defaults(run=_latency)


def _add_preset(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--preset",
        default="calm",
        help="calm, near-saturation, image-pull, cold-start, node-provisioning or instant (default: calm)",
    )


def _add_llm(commands: options.Subparsers) -> None:
    parser = commands.add_parser(
        "llm",
        help="does a history in its context teach SmolLM2-135M to wait?",
        description="Serves SmolLM2-135M through a cluster of one worker and lets it wait, with and without a history. "
        "Writes report.json and llm.png.",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("out/waiting-llm"), metavar="DIR", help="default: out/waiting-llm"
    )
    parser.add_argument("--seeds", type=_positive, default=3, help="default: 3")
    parser.add_argument("--episodes", type=_positive, default=10, help="default: 10")
    parser.set_defaults(run=_llm)


def _bench(args: argparse.Namespace) -> int:
    bench = _module("plexrl.waiting.bench.bench")
    bench.run(
        args.out,
        _names(args.laws),
        _names(args.agents),
        episodes=args.episodes,
        seeds=args.seeds,
        processes=args.processes,
    )
    return 0


def _run(args: argparse.Namespace) -> int:
    runs = _module("plexrl.waiting.bench.runs")
    runs.check_names([args.law], [] if args.chat_url else [args.agent])
    if args.chat_url and not args.chat_model:
        raise errors.ConfigurationError("--chat-url needs --chat-model, the model's name at the endpoint")
    agent = _chat_agent(args) if args.chat_url else runs.AGENTS[args.agent]()
    live = _module("plexrl.waiting.bench.live")
    exact = bool(args.chat_url) and args.history == "exact"
    live.run(agent, args.law, episodes=args.episodes, seed=args.seed, speed=args.speed, exact_history=exact)
    return 0


def _chat_agent(args: argparse.Namespace) -> Any:
    """The key comes from OPENAI_API_KEY, if the endpoint wants one."""
    chat = _module("plexrl.waiting.agents.chat")
    language = _module("plexrl.waiting.agents.language")
    prompts = _module("plexrl.waiting.agents.prompts")
    endpoint = chat.OpenAICompatible(args.chat_url, args.chat_model, api_key=os.environ.get("OPENAI_API_KEY", ""))
    return language.LanguageModel(endpoint, block=prompts.HistoryBlock(args.history), name=args.chat_model)


def _learn(args: argparse.Namespace) -> int:
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    return int(_module("plexrl.waiting.learned.demo").run(args.out, seeds, alone=args.alone))


def _serve(args: argparse.Namespace) -> int:
    serving = _module("plexrl.waiting.serving")
    serving.serve(
        serving.ServeOptions(
            preset=serving.checked_preset(args.preset),
            seed=args.seed,
            speed=args.speed,
            port=args.port,
            directory=args.dir,
            log=args.log,
        )
    )
    return 0


def _latency(args: argparse.Namespace) -> int:
    serving = _module("plexrl.waiting.serving")
    serving.add_latency(args.kubeconfig, serving.checked_preset(args.preset), nodes=args.nodes, seed=args.seed)
    return 0


def _llm(args: argparse.Namespace) -> int:
    language = _module("plexrl.waiting.bench.language")
    return int(language.run(args.out, seeds=args.seeds, episodes=args.episodes))


def _module(name: str) -> Any:
    """Imports what the extra `waiting` makes possible, or says that it is missing."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise errors.ConfigurationError(
            f"{error.name} is not installed; `plexrl waiting` needs: pip install 'plexrl[waiting]'"
        ) from error


def _names(listed: str) -> list[str]:
    return [name.strip() for name in listed.split(",") if name.strip()]


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"want 1 or more, not {text}")
    return number


def _natural(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"want 0 or more, not {text}")
    return number


def _speed(text: str) -> float:
    number = float(text)
    if not number > 0:
        raise argparse.ArgumentTypeError(f"want a number above 0, not {text}")
    return number
