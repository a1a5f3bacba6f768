"""Times scheduling decisions as they grow: a group with more jobs, a cluster with more groups. Pure code on one core.

`python -m benchmarks.decisions --out DIR` prints a table, writes decisions.json and decisions.png, and fails when a
decision is slower than its limit or its cost grows faster than n log n.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import log2
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from plexrl_controller.domain.ids import CallId, GroupId, JobId, ModelId, WorkerId
from plexrl_controller.domain.states import CallKind
from plexrl_controller.scheduling.invariants import violations
from plexrl_controller.scheduling.next_slice import next_slice
from plexrl_controller.scheduling.place import GroupRequest, PlacementRequest, Refused, Side, place
from plexrl_controller.scheduling.policy import Order, Policy
from plexrl_controller.scheduling.views import (
    ClusterView,
    Demand,
    GroupView,
    Hardware,
    JobView,
    MemberView,
    ModelView,
    NodeView,
    PlacedGroupView,
    ReadyCall,
)

SLICE_LIMIT_S, PLACE_LIMIT_S = 5e-3, 50e-3
GROUP_JOBS = (2, 4, 8, 16, 32, 64)
"""Up to twice as many as placement lets share a group."""
CLUSTERS = ((64, 13), (512, 100), (2_048, 400), (10_000, 2_000))
GIB = 1 << 30
NOW = 1_000.0


@dataclass(frozen=True)
class Row:
    """One size of one decision; times are processor time, for nothing here waits."""

    decision: str
    n: int
    what: str
    p50_s: float
    p99_s: float
    limit_s: float


def group_facts(jobs: int, rng: random.Random) -> list[list[list[tuple[str, float, float]]]]:
    """For each job and each of its one or two models up to 8 ready calls: id, ready since, expected seconds."""
    return [
        [
            [(f"c{j}.{m}.{c}", rng.uniform(0, NOW), rng.uniform(1, 60)) for c in range(rng.randint(0, 8))]
            for m in range(rng.randint(1, 2))
        ]
        for j in range(jobs)
    ]


def group_view(facts: list[list[list[tuple[str, float, float]]]]) -> GroupView:
    """The view of a busy group."""
    jobs = []
    for j, models in enumerate(facts):
        views = []
        for m, calls in enumerate(models):
            model_id = ModelId(f"m{j}.{m}")
            ready = tuple([ReadyCall(CallId(c), model_id, CallKind.GENERATE, at, 0, s) for c, at, s in calls])
            views.append(ModelView(model_id, 10 * GIB, j == 0, 900.0, ready, GIB if j == 0 else 0, load_s=1.0))
        jobs.append(
            JobView(
                JobId(f"j{j}"),
                tuple(views),
                last_finish=900.0 + j,
                round_trip_s=2.0,
                expected_stall_s=10.0,
                attained_s=37.0 * (j % 7),
                last_served=float(j),
            )
        )
    return GroupView(
        WorkerId("w"), True, 40 * GIB, tuple(jobs), JobId("j0"), NOW - 30, can_yield=True, background_moves=True
    )


def cluster_view(gpus: int, jobs: int, rng: random.Random) -> ClusterView:
    """Gangs of 4 to 128 over 96 % of the devices, members spread over them, the rest free in ones and threes."""
    hardware = Hardware(80 * GIB, 256 * GIB, {"gpu": "h100"})
    groups: list[tuple[WorkerId, ...]] = []
    left, workers = int(gpus * 0.96), 0
    while left >= 4:
        size = rng.choice([s for s in (4, 4, 8, 8, 8, 16, 16, 32, 64, 128) if s <= left])
        groups.append(tuple(WorkerId(f"w{workers + i}") for i in range(size)))
        left, workers = left - size, workers + size
    members: list[list[MemberView]] = [[] for _ in groups]
    for j in range(jobs):
        index = min((rng.randrange(len(groups)) for _ in range(4)), key=lambda i: len(members[i]))
        iteration_s = rng.uniform(100, 700)
        demand = Demand(
            iteration_s, iteration_s * rng.uniform(0.02, 0.3), rng.choice([1, 1, 8, 20]), rng.uniform(0.02, 1), 0.0, 4.0
        )
        model_ids = frozenset({ModelId(f"m{j}")})
        members[index].append(MemberView(JobId(f"j{j}"), rng.choice([2, 7, 16]) * GIB, model_ids, demand))
    nodes: list[NodeView] = []
    free = gpus - workers
    while free > 0:
        take = min(free, rng.randint(1, 3))
        nodes.append(NodeView(f"n{len(nodes)}", hardware, tuple(WorkerId(f"f{len(nodes)}.{i}") for i in range(take))))
        free -= take
    return ClusterView(
        tuple(
            PlacedGroupView(GroupId(f"g{i}"), ids, hardware, True, tuple(inside))
            for i, (ids, inside) in enumerate(zip(groups, members, strict=True))
        ),
        tuple(nodes),
    )


def request(rng: random.Random, slowdown_target: float) -> PlacementRequest:
    """One job: a gang whose demand is known."""
    iteration_s = rng.uniform(100, 700)
    demand = Demand(iteration_s, iteration_s * rng.uniform(0.05, 0.5), rng.choice([1, 8]), 0.3, 0.0, 4.0)
    group = GroupRequest(Side.BOTH, rng.choice([4, 8, 16, 32, 64]), 7 * GIB, demand)
    return PlacementRequest((group,), JobId("new"), slowdown_target=slowdown_target)


def timed(decisions: Sequence[Callable[[], object]]) -> tuple[float, float]:
    """Median and 99th percentile of the processor seconds that one decision takes."""
    seconds = []
    for decide in decisions:
        start = time.thread_time()
        decide()
        seconds.append(time.thread_time() - start)
    seconds.sort()
    return median(seconds), seconds[int(0.99 * (len(seconds) - 1))]


def decide_slice(facts: list[list[list[tuple[str, float, float]]]], policy: Policy) -> None:
    """One event: view, decision and check."""
    view = group_view(facts)
    assert violations(view, next_slice(view, NOW, policy)) == ()


def slice_rows(repetitions: int) -> list[Row]:
    """View, decision and check of one event on one group."""
    rows = []
    for jobs in GROUP_JOBS:
        rng = random.Random(jobs)
        decisions = [
            partial(decide_slice, group_facts(jobs, rng), Policy(order=list(Order)[i % 3])) for i in range(repetitions)
        ]
        p50_s, p99_s = timed(decisions)
        rows.append(Row("next_slice", jobs, f"{jobs} jobs", p50_s, p99_s, SLICE_LIMIT_S))
    return rows


def place_rows(repetitions: int, slowdown_target: float, name: str, *, full: bool = False) -> list[Row]:
    """One placement in a cluster."""
    rows = []
    for gpus, jobs in CLUSTERS:
        rng = random.Random(gpus)
        view = cluster_view(gpus, jobs, rng)
        if full:
            view = replace(view, nodes=())
        asked = [request(rng, slowdown_target) for _ in range(repetitions)]
        refused = sum(isinstance(place(view, r, Policy()), Refused) for r in asked)
        p50_s, p99_s = timed([partial(place, view, r, Policy()) for r in asked])
        what = f"{gpus:,} GPUs, {jobs:,} jobs, {len(view.groups)} groups, {refused / repetitions:.0%} refused"
        rows.append(Row(name, len(view.groups), what, p50_s, p99_s, PLACE_LIMIT_S))
    return rows


def grows_slower(rows: Sequence[Row]) -> bool:
    """Whether the median cost over n log n is no higher at the largest size than at the middle one, within noise."""
    per_unit = [row.p50_s / (row.n * log2(row.n + 1)) for row in rows]
    return per_unit[-1] <= 1.5 * per_unit[len(rows) // 2]


def main() -> int:
    """Returns the exit status: 1 when a limit is exceeded."""
    parser = argparse.ArgumentParser(prog="benchmarks.decisions", description="Times scheduling decisions.")
    parser.add_argument("--out", type=Path, default=Path("out/bench-decisions"), metavar="DIR")
    parser.add_argument("--repetitions", type=int, default=400, help="decisions of each size (default: 400)")
    args = parser.parse_args()
    families = [
        slice_rows(args.repetitions),
        place_rows(args.repetitions, 1.3, "place"),
        # Targets that nobody else's presence allows: every group is looked at, and most are predicted.
        place_rows(max(1, args.repetitions // 4), 1.0 + 1e-9, "place, nothing fits", full=True),
    ]
    checks = [
        {"name": f"{row.decision}, {row.what}: p99", "ok": row.p99_s <= row.limit_s, "value": row.p99_s}
        for rows in families
        for row in rows
    ]
    checks += [
        {"name": f"{rows[0].decision} grows no faster than n log n", "ok": grows_slower(rows), "value": rows[-1].p50_s}
        for rows in families
    ]
    args.out.mkdir(parents=True, exist_ok=True)
    report = {"rows": [asdict(row) for rows in families for row in rows], "checks": checks}
    (args.out / "decisions.json").write_text(json.dumps(report, indent=2) + "\n")
    console = Console()
    console.print(table_of(families))
    draw(families, args.out / "decisions.png")
    failed = [check["name"] for check in checks if not check["ok"]]
    console.print(f"failed: {'; '.join(map(str, failed))}" if failed else "all within their limits")
    console.print(f"report: {args.out / 'decisions.json'}")
    return 1 if failed else 0


def table_of(families: Sequence[Sequence[Row]]) -> Table:
    """Milliseconds of each decision."""
    table = Table(title="scheduling decisions, processor time of one core")
    for heading in ("decision", "size", "p50 ms", "p99 ms", "limit ms"):
        table.add_column(heading, justify="left" if heading in ("decision", "size") else "right")
    for rows in families:
        for row in rows:
            milliseconds = [f"{1e3 * s:.3g}" for s in (row.p50_s, row.p99_s, row.limit_s)]
            table.add_row(row.decision, row.what, *milliseconds)
    return table


def draw(families: Sequence[Sequence[Row]], path: Path) -> None:
    """Median cost against size, with n log n through the first point of each."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 4.0))
    for rows in families:
        sizes = [row.n for row in rows]
        (line,) = axes.loglog(sizes, [1e3 * row.p50_s for row in rows], "o-", label=rows[0].decision)
        scale = rows[0].p50_s / (sizes[0] * log2(sizes[0] + 1))
        axes.loglog(sizes, [1e3 * scale * n * log2(n + 1) for n in sizes], "--", color=line.get_color(), alpha=0.5)
    axes.set_xlabel("jobs on the group (next_slice), groups in the cluster (place)")
    axes.set_ylabel("median, ms (dashed: n log n)")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
