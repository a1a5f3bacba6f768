"""Committed text is free of things that only mean something on one machine."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:work|root|tmp/p)/")


def committed_files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def test_no_path_of_one_machine_is_committed() -> None:
    found = []
    for file in committed_files():
        if file.suffix == ".png" or file == Path(__file__):
            continue
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            if MACHINE_PATH.search(line):
                found.append(f"{file.relative_to(ROOT)}:{number}: {line.strip()[:80]}")
    assert found == []


def test_source_files_stay_short_enough_to_read() -> None:
    long = {
        str(file.relative_to(ROOT)): lines
        for file in committed_files()
        if file.suffix == ".py" and "/v1/" not in str(file) and (lines := len(file.read_text().splitlines())) > 600
    }
    assert long == {}
