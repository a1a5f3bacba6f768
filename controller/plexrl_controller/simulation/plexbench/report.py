"""Writes a run of plexbench: report.json, and a Markdown page with its pictures. Only gives numbers their form."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from plexrl_controller.simulation.plexbench.pictures import draw
from plexrl_controller.simulation.plexbench.rows import Row

PERCENT = {"saving", "fleet_saving", "slo_jobs", "slo_jobs_own", "slo_iterations", "goodput", "swap_share", "ceiling",
           "published", "prototype_saving", "worth_saving", "worth_slo_jobs", "hold_share", "freed",
           "prefetch_hit_rate"}  # fmt: skip

COLUMNS: dict[str, tuple[str, ...]] = {
    "T1": ("policy", "what", "saving", "fleet_saving", "slowdown_mean", "slowdown_p50", "slowdown_p99",
           "slowdown_worst", "slo_jobs", "slo_jobs_own", "slo_iterations", "completion", "completion_95",
           "floor", "goodput", "jain"),
    "T1 waits": ("policy", "wait_mean_s", "wait_p99_s", "wait_max_s", "queue_mean_s", "queue_p99_s", "queue_max_s",
                 "setup_s", "swap_share", "prefetch_hit_rate", "decision_p50_us", "decision_p99_us"),
    "T1b": ("slowdown_margin", "saving", "fleet_saving", "slowdown_mean", "slowdown_p99", "slo_jobs", "slo_jobs_own",
            "slo_iterations"),
    "T2": ("shape", "k", "ceiling", "published", "saving", "slowdown_mean", "slowdown_worst"),
    "T2b": ("d", "k", "granularity", "prototype_saving", "prototype_slowdown", "saving", "slowdown_mean"),
    "T3": ("lever", "saving", "worth_saving", "slo_jobs", "worth_slo_jobs", "slowdown_mean", "slowdown_p99",
           "queue_mean_s", "worth_queue_s", "decided"),
    "T3b": ("lever", "scenario", "figure", "with_it", "without", "worth"),
    "T4": ("swap_s", "hold", "predicted_slowdown", "admitted", "saving", "slowdown_mean", "swap_share", "hold_share",
           "ecap_over_bound"),
    "T5": ("gpus", "mix", "policy", "hours", "jobs", "jobs_running", "events", "run_s", "events_per_s",
           "decision_p50_us", "decision_p99_us", "placement_p50_ms", "placement_p99_ms"),
    "T5b": ("members", "decision_mean_us", "decision_p50_us", "decision_p99_us"),
    "T6": ("d", "cv", "order", "online_over_opt"),
    "T7": ("job_class", "replicas", "tail_replicas", "k", "freed", "stretch", "saving", "slowdown_mean"),
}  # fmt: skip

TITLES = {
    "T1": "T1: every policy on the same trace",
    "T1 waits": "T1, continued: waiting, swaps and decisions",
    "T1b": "T1, continued: what a stricter promise costs",
    "T2": "T2: rollout of one's own, training shared by k jobs",
    "T2b": "Fully shared groups with tool calls",
    "T3": "T3: what each lever is worth",
    "T3b": "T3, continued: levers that act on one group",
    "T4": "T4: what a swap may cost",
    "T5": "T5: scale",
    "T5b": "T5, continued: a decision by members of the group",
    "T6": "T6: two jobs against the exact optimum",
    "T7": "T7: consolidated tails",
}

NOTES = {
    "T1b": (
        "The first trace of T1 again, B10 with different `slowdown_margin`s: of the .3 that the target of 1.3 allows, "
        "placement keeps this part free, because its estimates are off (σ = .25). The controller's default is 1/3."
    ),
    "T1": (
        "Savings against each job's own dedicated form: split and one-step asynchronous for the three math "
        "classes, colocated for the others. `fleet_saving` is 1 - 1/ECap. `slo_jobs`: share of jobs whose mean "
        "slowdown is at most 1.3; `slo_jobs_own`: within the job's own target, U(1.1, 2). `completion` is "
        "relative to Isolated (B0) = 100, of the whole trace and of 95 % of its work; `floor` is the last job's end if "
        "every job ran alone in its own form from its arrival: what keeps the forms cannot complete earlier. B0c, B2, "
        "B3 and B3t change how or what a job computes: B0c takes all GPUs of a split job for both sides, B2 trains "
        "synchronous jobs one step off policy, B3 four, with rollouts that never drain."
    ),
    "T2": ("Against split-async alone. `published` are the figures of the PlexRL paper at k = 2."),
    "T2b": (
        "tool-8B with its tool calls stretched to the busy share d. The prototype columns are what plexbench "
        "calls reachable."
    ),
    "T3": (
        "The first trace of T1 with one thing changed. `worth` is what the change loses against B10 in the same "
        "repetition, with the interval of the difference, over twice as many repetitions as elsewhere. Levers that act "
        "on one group are below."
    ),
    "T3b": (
        "With and without one lever on the same segments; a positive worth helps. `cheap swaps`: three tool jobs, 30 % "
        "busy each, 4 s a move, a device that holds two of their states. `dear swaps`: 25 % busy, 80 s a move, one "
        "state; placement admits no such group of known jobs, but a job of which nothing is known goes where there is "
        "memory. `long calls`: two tool jobs, 15 % busy, beside calls of ten minutes. `over quota`: two tool jobs "
        "beside one whose tenant has used up its device seconds, 45 % busy each."
    ),
    "T4": (
        "Two tool jobs, 40 % busy, on a device that holds one of their states. `admitted` is what placement says "
        "of the pair at a target of 1.3."
    ),
    "T5": (
        "Processor time of one core. Decisions are view, decision and invariants. `8-GPU jobs`: the two smallest "
        "classes alone, for as many jobs as possible."
    ),
    "T6": ("Calls run to their end here, as the optimum's do."),
    "T7": (
        "Two jobs share a rollout group: the last fifth of a rollout's responses moves to `tail_replicas`, the "
        "other job's bulk has the rest; all k share one training group. `freed` is the part of replica time that "
        "consolidation frees, `stretch` what it costs a job alone, `saving` what both together give. 0 tail "
        "replicas: a rollout group each."
    ),
}


def write_json(report: dict[str, Any], folder: Path) -> Path:
    """Writes report.json; numbers that do not exist are null."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "report.json"
    path.write_text(json.dumps(_finite(report), indent=1) + "\n", encoding="utf-8")
    return path


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def write_markdown(report: dict[str, Any], path: Path, command: str) -> None:
    """Writes the page at `path` and its pictures into `pictures/` beside it."""
    tables, seed = report["tables"], report["seed"]
    pictures = path.parent / "pictures"
    pictures.mkdir(parents=True, exist_ok=True)
    drawn = draw(tables, pictures, path.stem)
    lines = [
        "# plexbench",
        "",
        f"Generated by `{command}`; not edited by hand. Seeds: {seed['rule']}, {seed['reps']} repetitions.",
        "± is half of the 95 % interval over repetitions.",
        "",
        "## Checks",
        "",
        "| | check | found |",
        "|---|---|---|",
        *[f"| {'ok' if c['ok'] else '**missed**'} | {c['name']} | {_value(c['value'])} |" for c in report["checks"]],
        "",
    ]
    for name, columns in COLUMNS.items():
        rows = tables[name.split()[0]]
        lines += [f"## {TITLES[name]}", ""]
        if name in NOTES:
            lines += [NOTES[name], ""]
        if name in drawn:
            lines += [f"![{TITLES[name]}](pictures/{drawn[name]})", ""]
        for heading, part in _parts(name, rows):
            lines += [*([f"**{heading}**", ""] if heading else []), *_table(columns, part), ""]
    path.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


def _parts(name: str, rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """T1 has a table for each trace."""
    if name not in ("T1", "T1 waits"):
        return [("", list(rows))]
    parts: dict[str, list[Row]] = {}
    for row in rows:
        heading = (
            f"{row['gpus']} GPUs, load {row['load']}, {row['hours']:g} hours, "
            f"{row['mean_iterations']:g} iterations a job"
        )
        parts.setdefault(heading, []).append(row)
    return list(parts.items())


def _table(columns: Sequence[str], rows: Sequence[Row]) -> list[str]:
    head = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return head + ["| " + " | ".join(_cell(row, column) for column in columns) + " |" for row in rows]


def _cell(row: Row, column: str) -> str:
    value = row.get(column)
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, float):
        return str(value)
    form: Callable[[float], str] = (lambda v: f"{100 * v:.1f} %") if column in PERCENT else _number
    half = row.get(f"{column}_ci95")
    if half is None or not math.isfinite(half) or half == 0.0:
        return form(value)
    return f"{form(value)} ± {100 * half:.1f}" if column in PERCENT else f"{form(value)} ± {_number(half)}"


def _number(value: float) -> str:
    if value == 0.0 or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_value(item)}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(_value(item) for item in value) or "none"
    return f"{value:,.4g}" if isinstance(value, float) and not isinstance(value, bool) else str(value)
