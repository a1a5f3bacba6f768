"""Waiting as an RLVR job, on real vLLM and torch: a few steps already lower the cost of held-out waits.

`make bench-waiting-learned` goes all the way; this is its beginning.
"""

import json
from pathlib import Path

import pytest

from plexrl.waiting.learned import demo
from plexrl.waiting.learned.job import Settings

SETTINGS = Settings(imitation_steps=60, steps=30, held_out=96, evaluate_every=30)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_job_learns_to_wait(tmp_path: Path) -> None:
    demo.run(tmp_path, [0], SETTINGS, alone=True)
    report = json.loads((tmp_path / "report.json").read_text())
    (learned,) = report["seeds"]
    start, end = learned["points"]
    assert start["well_formed"] > 0.9
    assert end["well_formed"] > 0.9
    assert end["sampled"] < 0.9 * start["sampled"]
    # 192 waits, one draw each, against the expectation over all draws: within a few standard errors.
    assert abs(learned["clock"] - end["greedy"]) < 0.25
    assert (tmp_path / "learned.png").stat().st_size > 0
