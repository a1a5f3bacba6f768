"""What a language model is told: the task, the tools, the prices, and the history of its earlier waits.

Pure text. The wording is ours: the paper's prompts are not public.
"""

import itertools
from collections.abc import Sequence
from enum import StrEnum

from plexrl.waiting.agents.interface import Observation, Record

SHOWN_RECORDS = 12


class HistoryBlock(StrEnum):
    """What the prompt says of earlier episodes."""

    NONE = "none"
    FULL = "full"
    """Sleeps, queries, states seen, and the interval in which it finished."""
    INTERVALS = "intervals"
    """The interval alone."""
    EXACT = "exact"
    """The exact times, which no agent can see by itself: what knowing them would be worth."""


def system(observation: Observation) -> str:
    """Who the agent is, what it may do, and what waiting costs."""
    costs = observation.costs
    return f"""You operate a Kubernetes cluster by writing Python. Actions return at once; their effects come later.
Write code that starts the operation, sleeps for as many seconds as you expect it to take, and looks once:

```python
{observation.operation.start}
time.sleep(seconds)
print({observation.operation.look})
```

Tools (time and kubectl are imported):
{observation.manual}

Each look in vain costs {costs.query:.3g}. Each second from the end of the operation to the look that sees it costs \
{costs.delay:.3g}. Answer with one code block and nothing else."""


def user(observation: Observation, history: Sequence[Record], block: HistoryBlock) -> str:
    """The operation, its history, and what has been seen so far."""
    parts = [f"Task: {observation.operation.goal}."]
    told = history_block(history, block)
    if told:
        parts.append(told)
    if observation.elapsed_s is None:
        parts.append("The operation has not been started.")
    else:
        parts.append(f"Started {observation.elapsed_s:.1f} s ago. Do not start it again.")
    parts += [f"After {at_s:.1f} s: {'finished' if ready else 'not finished'}." for at_s, ready in observation.states]
    if observation.output:
        parts.append(f"Your last code printed: {observation.output.strip()}")
    if observation.complaint:
        parts.append(f"Your last code was stopped: {observation.complaint}")
    return "\n".join(parts)


def history_block(history: Sequence[Record], block: HistoryBlock) -> str:
    """Of the last SHOWN_RECORDS waits for the same operation; empty if there is nothing to tell."""
    recent = list(history)[-SHOWN_RECORDS:]
    if block is HistoryBlock.NONE or not recent:
        return ""
    return "\n".join(["Earlier waits for this operation:", *(f"- {_told(record, block)}" for record in recent)])


def _told(record: Record, block: HistoryBlock) -> str:
    match block:
        case HistoryBlock.EXACT:
            if record.exact_s is None:
                raise ValueError("exact times are not in the history: run with exact_history=True")
            return f"it took {record.exact_s:.1f} s"
        case HistoryBlock.FULL:
            return f"{_interval(record)}; {_sleeps(record)}; {record.queries} queries, {_states(record)}"
        case _:
            return _interval(record)


def _interval(record: Record) -> str:
    if record.by_s == float("inf"):
        return f"it took more than {record.after_s:.1f} s"
    return f"it took between {record.after_s:.1f} and {record.by_s:.1f} s"


def _sleeps(record: Record) -> str:
    """Equal ones in a row are told once."""
    runs = [(seconds, len(list(group))) for seconds, group in itertools.groupby(record.sleeps_s)]
    told = [f"{seconds:.1f} s" + (f" {count} times" if count > 1 else "") for seconds, count in runs]
    return "slept " + (", then ".join(told) if told else "not at all")


def _states(record: Record) -> str:
    """The looks that matter: the last one in vain and the one that saw the end."""
    in_vain = [at_s for at_s, ready in record.states if not ready]
    seen = [at_s for at_s, ready in record.states if ready]
    told = [f"not finished at {in_vain[-1]:.1f} s"] if in_vain else []
    told += [f"finished at {seen[0]:.1f} s"] if seen else []
    return ", ".join(told) or "nothing seen"
