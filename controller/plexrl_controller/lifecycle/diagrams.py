"""Renders the tables as documentation: `python -m plexrl_controller.lifecycle.diagrams > docs/lifecycle.md`."""

from typing import Any

from plexrl_controller.lifecycle import calls, jobs, models, sessions, workers
from plexrl_controller.lifecycle.machine import Machine

MACHINES: tuple[Machine[Any, Any, Any], ...] = (
    calls.MACHINE,
    sessions.MACHINE,
    models.MACHINE,
    jobs.MACHINE,
    workers.MACHINE,
)


def render() -> str:
    """The whole document."""
    parts = [
        "# Life cycles",
        "",
        "Generated from the tables in `controller/plexrl_controller/lifecycle/`; do not edit. What each state means",
        "stands beside its enum value in `protos/`. Effects are performed only once the transition is durable.",
    ]
    for machine in MACHINES:
        parts += ["", f"## {machine.name}", "", *_diagram(machine), "", *_table(machine)]
    return "\n".join(parts) + "\n"


def _diagram(machine: Machine[Any, Any, Any]) -> list[str]:
    edges: dict[tuple[str, str], list[str]] = {}
    for transition in machine.transitions:
        for source in sorted(transition.sources):
            edges.setdefault((source.name, transition.target.name), []).append(transition.event.name)
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {machine.initial.name}"]
    lines += [f"    {source} --> {target}: {', '.join(events)}" for (source, target), events in edges.items()]
    lines += [f"    {state.name} --> [*]" for state in sorted(machine.terminal)]
    return [*lines, "```"]


def _table(machine: Machine[Any, Any, Any]) -> list[str]:
    lines = ["| event | from | to | effects | note |", "|---|---|---|---|---|"]
    for t in machine.transitions:
        sources = ", ".join(s.name for s in sorted(t.sources))
        effects = ", ".join(effect.name for effect in t.effects)
        lines.append(f"| {t.event.name} | {sources} | {t.target.name} | {effects} | {t.note} |")
    return lines


if __name__ == "__main__":
    print(render(), end="")
