"""What every tier shares: the order of the tiers, their marks, and how long each took.

A tier is a folder; a test gets the marks of its tier from where it lies. Its limit ends a test that hangs; it is many
times what the slowest needs, so that a slow machine is no failure.
"""

import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

# Before numpy or torch load: a test process must not take both cores for an idle spin.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from plexrl_controller.embedded.postgres import EmbeddedPostgres

TIERS = ("unit", "hygiene", "store", "component", "simulation", "fault", "e2e", "gpu")
TIMEOUT_S = {
    "unit": 60,
    "hygiene": 120,
    "store": 120,
    "component": 120,
    "simulation": 120,
    "fault": 240,
    "e2e": 420,
    "gpu": 600,
}
TESTS = Path(__file__).parent

pytest.register_assert_rewrite("tests.support.fault_checks")

settings.register_profile("plexrl", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("plexrl")

_seconds: defaultdict[str, float] = defaultdict(float)


def tier_of(path: Path) -> str:
    return path.relative_to(TESTS).parts[0]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        tier = tier_of(item.path)
        if tier in ("e2e", "fault", "gpu"):
            item.add_marker(tier)
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S[tier]))
        if tier == "gpu" and not Path("/dev/nvidiactl").exists():
            item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))
    items.sort(key=lambda item: TIERS.index(tier_of(item.path)))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _seconds[Path(report.nodeid.split("::")[0]).parts[1]] += report.duration


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    spent = [f"{tier} {_seconds[tier]:.1f} s" for tier in TIERS if tier in _seconds]
    terminalreporter.write_line("time per tier: " + ", ".join(spent))


@pytest.fixture(scope="session")
def postgres_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator["EmbeddedPostgres"]:
    """One Postgres for the whole run; make databases in it with `create_database(name, template=...)` (about 40 ms)."""
    from plexrl_controller.embedded.postgres import EmbeddedPostgres

    with EmbeddedPostgres(tmp_path_factory.mktemp("postgres") / "data", fsync=False) as cluster:
        yield cluster
