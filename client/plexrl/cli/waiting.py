"""`plexrl waiting`: agents that learn to wait, measured against the best that is possible.

The flags are known to the base install; what runs is imported when it runs and needs the extra `waiting`.
"""

import argparse
import importlib
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


def _add_bench(commands: options.Subparsers) -> None:
    parser = commands.add_parser(
        "bench",
        help="agents times laws: a table, learning curves, report.json",
        description="Every agent waits for the same operations under every law, episode after episode. Writes "
        "report.json, rows.csv and curves.png.",
    )
    parser.add_argument("--out", type=Path, default=Path("out/waiting"), metavar="DIR", help="default: out/waiting")
    parser.add_argument("--laws", default="", metavar="A,B", help="default: all")
    parser.add_argument("--agents", default="", metavar="A,B", help="default: all")
    parser.add_argument("--episodes", type=_positive, default=60, help="per agent, law and seed (default: 60)")
    parser.add_argument("--seeds", type=_positive, default=3, help="default: 3")
    parser.add_argument("--processes", type=_positive, default=2, help="default: 2")
    parser.set_defaults(run=_bench)


def _add_run(commands: options.Subparsers) -> None:
    parser = commands.add_parser("run", help="watch one agent wait", description="Tells an agent's episodes live.")
    parser.add_argument("--agent", default="empirical", help="default: empirical")
    parser.add_argument("--law", default="gamma-4", help="default: gamma-4")
    parser.add_argument("--episodes", type=_positive, default=3, help="default: 3")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    parser.add_argument(
        "--speed", type=_speed, default=30.0, help="seconds of the clock per second (default: 30; inf: at once)"
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
    parser.add_argument("--seeds", type=_positive, default=3, help="default: 3")
    parser.set_defaults(run=_learn)


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
    runs.check_names([args.law], [args.agent])
    live = _module("plexrl.waiting.bench.live")
    live.run(runs.AGENTS[args.agent](), args.law, episodes=args.episodes, seed=args.seed, speed=args.speed)
    return 0


def _learn(args: argparse.Namespace) -> int:
    return int(_module("plexrl.waiting.learned.demo").run(args.out, args.seeds))


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


def _speed(text: str) -> float:
    number = float(text)
    if not number > 0:
        raise argparse.ArgumentTypeError(f"want a number above 0, not {text}")
    return number
