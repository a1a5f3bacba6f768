"""`python -m plexrl_controller.embedded SETTINGS`: a supervisor that LocalCluster starts as a process of its own."""

import sys
from datetime import UTC, datetime

from plexrl_controller.embedded.foreground import run
from plexrl_controller.embedded.settings import ClusterSettings


def _say(line: str) -> None:
    print(f"{datetime.now(UTC).isoformat(timespec='milliseconds')} {line}", flush=True)


if __name__ == "__main__":
    sys.exit(run(ClusterSettings.from_json(sys.argv[1]), _say, lambda endpoint: _say(f"ready at {endpoint}")))
