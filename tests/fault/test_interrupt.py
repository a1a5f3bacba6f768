"""Ctrl-C ends a program whose jobs wait for a cluster in threads."""

import signal
import subprocess
import sys

PROGRAM = """
import signal
import threading
from plexrl.at_once import at_once

# A shell starts what runs behind with interrupts ignored, and so these tests.
signal.signal(signal.SIGINT, signal.default_int_handler)

def work(number):
    if number == 1:
        print("waiting", flush=True)
    threading.Event().wait()

at_once(work, (0, 1))
"""


def test_an_interrupt_does_not_wait_for_what_runs_at_once() -> None:
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == b"waiting\n"
        program.send_signal(signal.SIGINT)
        try:
            assert program.wait(60) != 0
        finally:
            program.kill()
