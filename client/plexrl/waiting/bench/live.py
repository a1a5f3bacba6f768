"""`plexrl waiting run`: one agent under one law, told as it happens."""

import time

from rich.console import Console
from rich.text import Text

from plexrl.waiting.agents.interface import Agent
from plexrl.waiting.bench.runs import scenario_of, world_of
from plexrl.waiting.episodes import Event, Run
from plexrl.waiting.sandbox import Sandbox

_STYLES = {
    "code": "cyan",
    "sleep": "dim",
    "stopped": "red",
    "detected": "green",
    "deadline": "yellow",
    "gave_up": "red",
}


def run(agent: Agent, law: str, *, episodes: int, seed: int, speed: float, exact_history: bool = False) -> None:
    """Prints each action, sleep and outcome. Sleeps last as long as on the clock, divided by `speed`; inf: no time."""
    console = Console()
    clock_s = 0.0

    def watch(event: Event) -> None:
        nonlocal clock_s
        ahead_s = max(event.at_s - clock_s, 0.0)
        clock_s = event.at_s
        time.sleep(ahead_s / speed)
        for number, line in enumerate(event.text.splitlines() or [""]):
            head = f"{event.at_s:9.1f} s  {event.operation:8} {event.what:9}" if number == 0 else " " * 31
            text = Text(f"{head} {line}", style=_STYLES.get(event.what, ""))
            console.print(text, highlight=False, no_wrap=True, overflow="ellipsis")

    with Sandbox() as sandbox:
        life = Run(
            scenario_of(law), agent, sandbox, seed, watch=watch, exact_history=exact_history, world=world_of(law)
        )
        for episode in range(episodes):
            clock_s = 0.0
            console.rule(f"{agent.name}, {law}, episode {episode}", align="left")
            scores = life.run_episode()
            cost, floor = sum(score.cost for score in scores), sum(score.floor_cost for score in scores)
            console.print(f"cost {cost:.1f}, the floor {floor:.1f}, on the same draws", style="bold", highlight=False)
