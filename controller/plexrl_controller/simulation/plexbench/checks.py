"""What plexbench must show, each as a named check over the tables, with the value that was found. Hides nothing."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plexrl_controller.simulation.plexbench.rows import Row, first_part
from plexrl_controller.simulation.plexbench.traces import TRACE_KEYS

SHARING = ("B4", "B5", "B6", "B7", "B9-pack", "B9-spread", "B9-backfill")
Tables = Mapping[str, Sequence[Row]]


@dataclass(frozen=True, slots=True)
class Check:
    """A bar and what was found."""

    name: str
    ok: bool
    value: Any

    def as_json(self) -> dict[str, Any]:
        """For report.json."""
        return {"name": self.name, "ok": self.ok, "value": self.value}


def checks(tables: Tables) -> list[Check]:
    """All checks that the tables allow."""
    return [
        *_shared_training(tables["T2"]),
        *_fully_shared(tables["T2b"]),
        *_cluster(tables["T1"]),
        _frontier(tables["T1"], tables["T1b"]),
        _levers(tables["T3"], tables["T3b"]),
        *_swaps(tables["T4"]),
        *_ratios(tables["T6"], tables["bounds"]),
        *_scale(tables["T5"], tables["T5b"]),
    ]


def _one(rows: Iterable[Row], **keys: Any) -> Row:
    return next(row for row in rows if all(row.get(key) == value for key, value in keys.items()))


def _shared_training(rows: Sequence[Row]) -> list[Check]:
    found = []
    for members, bar in ((3, 0.49), (4, 0.55)):
        row = _one(rows, shape="g=.75, 20 % busy", k=members)
        ok = row["saving"] >= bar and row["slowdown_mean"] <= 1.02
        value = {"saving": row["saving"], "slowdown_mean": row["slowdown_mean"]}
        found.append(Check(f"T2: k = {members}: saving >= {bar} at mean slowdown <= 1.02", ok, value))
    within = all(row["saving"] <= row["ceiling"] + 0.01 for row in rows)
    found.append(Check("T2: no saving passes its ceiling by more than the noise of the ideal", within, within))
    return found


def _fully_shared(rows: Sequence[Row]) -> list[Check]:
    found = []
    for row in rows:
        if row["granularity"] != "turn-level":
            continue
        # The same slowdown or better, and the saving within two points or better.
        ok = row["saving"] >= row["prototype_saving"] - 0.02
        ok = ok and row["slowdown_mean"] <= row["prototype_slowdown"] + 0.02
        value = {"saving": row["saving"], "slowdown_mean": row["slowdown_mean"]}
        found.append(Check(f"fully shared, d = {row['d']}, k = {row['k']}: reaches the prototype", ok, value))
    return found


def _cluster(rows: Sequence[Row]) -> list[Check]:
    rows = _first_trace(rows)
    ours = _one(rows, policy="B10")
    numbered = [row for row in rows if row["policy"].startswith("B") and not row["policy"].startswith("B10")]
    as_specified = [row for row in numbered if row["policy"] != "B3t"]
    best = max(as_specified, key=lambda row: row["fleet_saving"])
    sharing = [row for row in as_specified if row["policy"] in SHARING]
    rival = max(sharing, key=lambda row: row["fleet_saving"])
    b9 = min((row for row in rows if row["policy"].startswith("B9")), key=lambda row: row["completion"])
    tuned = _one(rows, policy="B3t")
    isolated = _one(rows, policy="B0")
    return [
        Check(
            "T1: B10 has the highest fleet saving of B0 to B10 as specified",
            ours["fleet_saving"] > best["fleet_saving"],
            {"B10": ours["fleet_saving"], best["policy"]: best["fleet_saving"]},
        ),
        Check(
            "T1: against the sharing baseline with the highest saving: SLO attainment equal or better",
            ours["slo_jobs"] >= rival["slo_jobs"],
            {"B10": ours["slo_jobs"], rival["policy"]: rival["slo_jobs"]},
        ),
        Check("T1: B10 keeps at least 92 % of jobs within 1.3", ours["slo_jobs"] >= 0.92, ours["slo_jobs"]),
        Check(
            "T1: completion of the trace at most .9 of the best B9",
            ours["completion"] <= 0.9 * b9["completion"],
            {"ratio": ours["completion"] / b9["completion"], "B9": b9["policy"]},
        ),
        Check(
            "T1: that bar can be met: the longest job, alone from its arrival, ends before .9 of the best B9",
            ours["floor"] <= 0.9 * b9["completion"],
            {"floor / B9": ours["floor"] / b9["completion"]},
        ),
        Check(
            "T1: completion of the trace at most 1.1 times that floor",
            ours["completion"] <= 1.1 * ours["floor"],
            {"B10 / floor": ours["completion"] / ours["floor"], "B9 / floor": b9["completion"] / ours["floor"]},
        ),
        Check(
            "T1: completion of 95 % of the work at most .9 of the same B9",
            ours["completion_95"] <= 0.9 * b9["completion_95"],
            {"ratio": ours["completion_95"] / b9["completion_95"], "B9": b9["policy"]},
        ),
        Check("T1: B0 saves 0 within .5 %", abs(isolated["saving"]) <= 0.005, isolated["saving"]),
        Check(
            "T1: B10 also saves more than fully asynchronous training with the best split (it changes the algorithm)",
            ours["fleet_saving"] > tuned["fleet_saving"],
            {"B10": ours["fleet_saving"], "B3t": tuned["fleet_saving"]},
        ),
    ]


def _first_trace(rows: Sequence[Row]) -> list[Row]:
    """Rows of the trace that the bars are about: 512 GPUs, load 1.2."""
    return first_part(rows, TRACE_KEYS)


def _frontier(rows: Sequence[Row], margins: Sequence[Row]) -> Check:
    """Dedicated groups keep every promise; what shares must be beaten in both at once, each at some margin."""
    unbeaten = []
    for row in _first_trace(rows):
        if row["policy"] not in SHARING:
            continue
        better = [m for m in margins if m["slo_jobs"] >= row["slo_jobs"] and m["fleet_saving"] > row["fleet_saving"]]
        if not better:
            unbeaten.append(row["policy"])
    name = "T1b: for each baseline that shares, a margin at which B10 saves more at equal or better SLO attainment"
    return Check(name, not unbeaten, {"not beaten": unbeaten})


def _levers(traces: Sequence[Row], groups: Sequence[Row]) -> Check:
    """A lever that makes no difference where it is meant to should go. Intervals are those of the paired difference."""
    off = [row for row in traces if not row["lever"].startswith(("all on", "order", "chunking"))]
    figures = ("worth_saving", "worth_slo_jobs", "worth_queue_s")
    found = {row["lever"]: any(_shown(row, figure) for figure in figures) for row in off}
    found |= {row["lever"]: _shown(row, "worth") for row in groups}
    unshown = [lever for lever, shown in found.items() if not shown]
    name = "T3: every lever is worth more than the interval of its difference where it is meant to help"
    return Check(name, not unshown, {"not shown": unshown})


def _shown(row: Row, worth: str) -> bool:
    half = row[f"{worth}_ci95"]
    return bool(row[worth] > (half if math.isfinite(half) else 0.0))


def _swaps(rows: Sequence[Row]) -> list[Check]:
    live = [row for row in rows if row["hold"] == "turn-level, ski rental"]
    admitted = [row for row in live if row["admitted"]]
    refused = [row for row in live if not row["admitted"]]
    harmful = [row["swap_s"] for row in admitted if row["slowdown_mean"] > 1.3]
    wrong = [row["swap_s"] for row in refused if row["saving"] > 0.0 and row["slowdown_mean"] <= 1.3]
    return [
        Check("T4: no admitted pair runs more than 1.3 times slower", not harmful, {"swap_s": harmful}),
        Check("T4: no refused pair would have met the target", not wrong, {"swap_s": wrong}),
    ]


def _ratios(rows: Sequence[Row], bounds: Sequence[Row]) -> list[Check]:
    values = [row["online_over_opt"] for row in rows if row["order"] != "cyclic"]
    least = min(row["ecap_over_bound"] for row in bounds)
    most = max(row["ecap_over_bound"] for row in bounds)
    return [
        Check(
            "T6: online / optimum of two jobs within [1, 1.05]",
            min(values) >= 1.0 - 1e-9 and max(values) <= 1.05,
            {"least": min(values), "most": max(values)},
        ),
        Check("ECap / bound >= .93 once k d >= 1.5, and never above 1", least >= 0.93 and most <= 1.01, least),
    ]


def _scale(rows: Sequence[Row], decisions: Sequence[Row]) -> list[Check]:
    ours = [row for row in rows if row["policy"] == "B10"]
    engine = [row for row in rows if row["policy"] == "B0"]
    decision_us = max(row["decision_p99_us"] for row in ours)
    placement_ms = max(row["placement_p99_ms"] for row in ours)
    small, large = decisions[0], decisions[-1]
    size = large["members"] / small["members"]
    growth = large["decision_mean_us"] / small["decision_mean_us"]
    return [
        Check("T5: view, decision and check: p99 <= 5 ms", decision_us <= 5000.0, {"p99_us": decision_us}),
        Check(
            "T5: placement of one job: p99 <= 50 ms",
            placement_ms <= 50.0,
            {"p99_ms": placement_ms, "gpus": max(row["gpus"] for row in ours)},
        ),
        Check(
            "T5: engine alone: 100,000 events/s",
            max(row["events_per_s"] for row in engine) >= 100_000.0,
            {_scale_of(row): row["events_per_s"] for row in engine},
        ),
        Check(
            "T5: engine with our policy: 100,000 events/s",
            max(row["events_per_s"] for row in ours) >= 100_000.0,
            {_scale_of(row): row["events_per_s"] for row in ours},
        ),
        Check(
            "T5: a decision's cost grows no faster than n log n",
            growth <= size * math.log2(size),
            {"growth": growth, "members": [small["members"], large["members"]]},
        ),
    ]


def _scale_of(row: Row) -> str:
    """GPUs, and the mix where it is not that of the traces: of as many GPUs there are two rows."""
    return str(row["gpus"]) if row["mix"] == "all classes" else f"{row['gpus']} ({row['mix']})"
