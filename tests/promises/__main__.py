"""Breaks the code in one place at a time, in a copy, and wants to see each promise's test fail.

    python -m tests.promises [--quick] [--only G05 ...] [--out out/promises]

Knows nothing of what the promises are: `table` says that.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import track

from tests.promises.table import MUTATIONS, PROMISES, Mutation

ROOT = Path(__file__).parents[2]
SOURCES = ("client", "controller", "worker", "migrations")
COPIED = (*SOURCES, "tests", "protos", "deploy", "docs", "pyproject.toml", "Makefile")
LIMIT_S = 420.0
NOT_BY_THE_TEST = ("ImportError", "ModuleNotFoundError", "SyntaxError", "NameError", "IndentationError", "fixture ")


@dataclass(frozen=True)
class Verdict:
    """What became of one mutation."""

    mutation: Mutation
    caught: bool
    seen: str
    seconds: float


def main() -> int:
    """Prints the table, writes the report; 1 when a defect was not noticed."""
    parser = argparse.ArgumentParser(prog="python -m tests.promises", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="leave out what needs the real engine")
    parser.add_argument("--only", nargs="*", default=(), metavar="G05", help="these promises alone")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "promises")
    asked = parser.parse_args()
    mutations = [m for m in MUTATIONS if not (asked.quick and m.engine) and (not asked.only or m.promise in asked.only)]
    with tempfile.TemporaryDirectory(prefix="plexrl-promises-") as directory:
        tree = copy_tree(Path(directory) / "tree")
        verdicts = try_all(tree, mutations)
    survived = [verdict for verdict in verdicts if not verdict.caught]
    asked.out.mkdir(parents=True, exist_ok=True)
    report = {"promises": PROMISES, "verdicts": [asdict(verdict) for verdict in verdicts]}
    (asked.out / "report.json").write_text(json.dumps(report, indent=1))
    shown = len({v.mutation.promise for v in verdicts if v.caught})
    print(
        f"{len(verdicts) - len(survived)} of {len(verdicts)} defects noticed, {shown} promises; {asked.out}/report.json"
    )
    return 1 if survived or not verdicts else 0


def copy_tree(tree: Path) -> Path:
    """The working tree as it is, without what was built."""
    tree.mkdir()
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, tree / name)
    return tree


def try_all(tree: Path, mutations: Sequence[Mutation]) -> list[Verdict]:
    """First the code as it is, under every test; then each defect under its own."""
    tests = sorted({mutation.test for mutation in mutations})
    print(f"{len(tests)} tests on the code as it is", flush=True)
    outcome, text = run_tests(tree, tests, LIMIT_S * max(1, len(tests) // 4))
    if outcome != "passed":
        raise SystemExit(f"the tests do not pass on the code as it is:\n{text}")
    verdicts = []
    for mutation in track(mutations, "defects", console=Console(stderr=True)):
        verdicts.append(try_one(tree, mutation))
        print(line(verdicts[-1]), flush=True)
    return verdicts


def try_one(tree: Path, mutation: Mutation) -> Verdict:
    """Makes one change, runs its test, takes the change back."""
    path = tree / mutation.file
    text = path.read_text()
    if text.count(mutation.old) != 1:
        return Verdict(mutation, False, f"the text occurs {text.count(mutation.old)} times in {mutation.file}", 0.0)
    began = time.monotonic()
    rewrite(path, text.replace(mutation.old, mutation.new))
    try:
        outcome, seen = run_tests(tree, [mutation.test], LIMIT_S)
    finally:
        rewrite(path, text)
    plain = seen.startswith(("AssertionError", "assert ", "Failed: ", "ExceptionGroup"))
    by_the_test = mutation.seen in seen if mutation.seen else plain
    caught = outcome == "failed" and by_the_test and not any(word in seen for word in NOT_BY_THE_TEST)
    return Verdict(mutation, caught, seen if outcome == "failed" else outcome, time.monotonic() - began)


def rewrite(path: Path, text: str) -> None:
    """Writes a source with a time of its own: bytecode of one second and one length would be taken for its own."""
    later = path.stat().st_mtime + 10.0
    path.write_text(text)
    os.utime(path, (later, later))


def run_tests(tree: Path, tests: Sequence[str], limit_s: float) -> tuple[str, str]:
    """`passed`, `failed` or `error`, and the first thing that was seen."""
    results = tree / "results.xml"
    results.unlink(missing_ok=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"} | {
        "PYTHONPATH": os.pathsep.join([str(tree / name) for name in SOURCES] + [str(tree)])
    }
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "", "-p", "no:cacheprovider", f"--junitxml={results}"]
    try:
        done = subprocess.run([*command, *tests], cwd=tree, env=environment, capture_output=True, text=True,
                              timeout=limit_s, check=False)  # fmt: skip
    except subprocess.TimeoutExpired:
        return "error", f"no end within {limit_s:.0f} s"
    if done.returncode == 0:
        return "passed", ""
    if not results.exists():
        return "error", (done.stdout + done.stderr)[-2000:]
    for case in ElementTree.parse(results).iter("testcase"):  # noqa: S314 - our own pytest wrote it
        for kind in ("failure", "error"):
            if (found := case.find(kind)) is not None:
                return ("failed" if kind == "failure" else "error"), found.get("message", "")
    return "error", (done.stdout + done.stderr)[-2000:]


def line(verdict: Verdict) -> str:
    """Promise, test, the code that it fails without, what was seen."""
    mutation = verdict.mutation
    where = f"{mutation.file}: {mutation.breaks}"
    seen = " ".join(verdict.seen.split())[:110]
    mark = "noticed" if verdict.caught else "SURVIVED"
    return f"{mutation.promise} {mark:8} {mutation.test}\n    without {where}\n    {verdict.seconds:.0f} s: {seen}"


if __name__ == "__main__":
    sys.exit(main())
