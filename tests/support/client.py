"""Fixtures of the client's component tests: a controller in memory and a client that retries quickly."""

from collections.abc import Iterator

import pytest

from plexrl.cluster import Cluster
from plexrl.connection import Connection, Retry, Target
from tests.support.fake_controller import FakeController

QUICK = Retry(bound_s=10.0, first_s=0.005, most_s=0.05)


@pytest.fixture(name="controller")
def controller_fixture() -> Iterator[FakeController]:
    controller = FakeController().start()
    yield controller
    controller.stop()


@pytest.fixture(name="cluster")
def cluster_fixture(controller: FakeController) -> Iterator[Cluster]:
    with Cluster(Connection(Target(controller.endpoint, controller.token), QUICK)) as cluster:
        yield cluster
