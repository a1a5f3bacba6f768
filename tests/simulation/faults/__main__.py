"""`make simulate-faults`: many seeds on all cores; one that fails is made short and printed with its command."""

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter
from dataclasses import replace

from tests.simulation.faults.world import Plan, Verdict, run


def shortest(verdict: Verdict) -> Verdict:
    """The same seed with as few faults, then rounds, as still fail."""
    for field, most in (("faults", len(verdict.faults)), ("rounds", 8)):
        for count in range(most):
            shorter = run(replace(verdict.plan, **{field: count}))
            if shorter.violations:
                verdict = shorter
                break
    return verdict


def describe(verdict: Verdict) -> str:
    """What failed, and how to see it again."""
    plan, faults = verdict.plan, ", ".join(verdict.faults) or "none"
    options = "".join(f" --{k} {v}" for k, v in (("faults", plan.faults), ("rounds", plan.rounds)) if v is not None)
    lines = [f"seed {plan.seed} (faults: {faults}):", *(f"  {violation}" for violation in verdict.violations[:5])]
    return "\n".join([*lines, f"  see it: python -m tests.simulation.faults --show --first {plan.seed}{options}"])


def main() -> int:
    """Runs the seeds that the arguments name."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.faults", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first")
    parser.add_argument("--faults", type=int, help="at most so many faults in each")
    parser.add_argument("--rounds", type=int, help="so many rounds of each client")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--show", action="store_true", help="print the whole history")
    args = parser.parse_args()
    plans = [Plan(seed, args.faults, args.rounds) for seed in range(args.first, args.first + args.seeds)]
    started_s, failed, calls, executions, virtual_s = time.monotonic(), 0, 0, 0, 0.0
    faults: Counter[str] = Counter()
    with multiprocessing.Pool(args.jobs) as pool:
        for verdict in pool.imap_unordered(run, plans, chunksize=1 if args.seeds < 100 else 8):
            calls, executions = calls + verdict.calls, executions + verdict.executions
            virtual_s += verdict.virtual_s
            faults.update(verdict.faults)
            if args.show:
                print("\n".join(verdict.history))
            if verdict.violations:
                failed += 1
                print(describe(verdict if args.show else shortest(verdict)), flush=True)
    print(f"{len(plans)} seeds, {failed} with violations; {calls} calls accepted, {executions} executions")
    print(f"faults: {', '.join(f'{kind} {count}' for kind, count in sorted(faults.items())) or 'none'}")
    print(f"{virtual_s / 3600:.1f} hours of virtual time in {time.monotonic() - started_s:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
