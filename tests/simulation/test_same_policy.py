"""The simulator runs the very policy objects of the live controller: no copy, no stand-in."""

import ast
import inspect
from pathlib import Path

import plexrl_controller.dispatch.cycle as live_cycle
import plexrl_controller.simulation as simulation
from plexrl_controller.scheduling import next_slice as decide
from plexrl_controller.scheduling import place as placing
from plexrl_controller.simulation import live_placement, live_policy


def test_slices_are_decided_by_the_function_that_the_live_cycle_calls() -> None:
    assert vars(live_policy)["next_slice"] is decide.next_slice
    assert vars(live_cycle)["next_slice"] is decide.next_slice
    assert vars(live_policy)["violations"] is vars(live_cycle)["violations"]


def test_jobs_are_placed_by_the_function_that_the_live_controller_calls() -> None:
    assert vars(live_placement)["place"] is placing.place
    assert vars(live_placement)["reserve"] is placing.reserve


def test_no_module_of_the_simulator_defines_a_policy_function_of_its_own() -> None:
    root = Path(inspect.getfile(simulation)).parent
    names = {"next_slice", "place", "reserve", "predict", "violations", "make_room"}
    for path in root.glob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert not names & defined, f"{path.name} defines {names & defined}"
