"""The table of promises stays true: each has a test that carries its number, and each change fits the code as it is."""

import ast
import functools
from pathlib import Path

from tests.promises.table import MUTATIONS, PROMISES, Mutation

ROOT = Path(__file__).parents[2]


def test_every_promise_has_a_test_that_is_shown_to_notice() -> None:
    assert sorted(PROMISES) == [f"G{number:02}" for number in range(1, 24)]
    assert {mutation.promise for mutation in MUTATIONS} == set(PROMISES)
    assert {m.promise for m in MUTATIONS if not m.engine} >= set(PROMISES) - {"G07"}


def test_every_change_fits_the_code_and_every_test_carries_its_number() -> None:
    wrong = [f"{m.promise} {m.test}: {found}" for m in MUTATIONS if (found := problem(m))]
    assert not wrong


def problem(mutation: Mutation) -> str:
    """What is not true any more of a row; nothing when all is."""
    occurs = (ROOT / mutation.file).read_text().count(mutation.old)
    if occurs != 1 or mutation.new == mutation.old:
        return f"its text occurs {occurs} times in {mutation.file}, or does not change"
    file, *names = mutation.test.split("::")
    words = [ast.get_docstring(parsed(file)) or ""]
    within: ast.Module | ast.ClassDef = parsed(file)
    for name in names:
        found = member(within, name) or of_a_suite(name)
        if found is None:
            return "there is no such test"
        words += [name, ast.get_docstring(found) or ""]
        within = found if isinstance(found, ast.ClassDef) else within
    return "" if mutation.promise in " ".join(words).upper() else "it does not say its promise's number"


def member(
    within: ast.Module | ast.ClassDef, name: str
) -> ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | None:
    """A function or class by name."""
    for node in within.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == name:
            return node
    return None


def of_a_suite(name: str) -> ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | None:
    """A test that its class inherits from the suite that all engines pass, which lies in several files."""
    for path in sorted((ROOT / "tests/support").glob("engine_*.py")):
        suites = [node for node in parsed(f"tests/support/{path.name}").body if isinstance(node, ast.ClassDef)]
        found = [test for suite in suites if suite.name.endswith("Conformance") and (test := member(suite, name))]
        if found:
            return found[0]
    return None


@functools.cache
def parsed(file: str) -> ast.Module:
    """A test file's tree."""
    return ast.parse((ROOT / file).read_text())
