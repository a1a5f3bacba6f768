"""Faults that the fake engine commits to order. Never for real work.

    "plexrl_fake": [{"function": "generate", "fault": "crash", "flag_file": "/tmp/once"}]

function: a method of the port, start, load (a state really comes onto the device: by swap_in, unless preload has
brought it), or completion-N, before the Nth completion of a generate is sampled. fault: crash (SIGKILL of the process,
in the middle of the function), exit (code 3), hang (forever), slow (`delay_s`, cut short by abort and yield), fail (an
error that is not typed), out_of_memory, leak (`leak_bytes` more held by each call), held (completion-N alone: not while
flag_file exists; generates that run together do not wait for each other there). flag_file of the others: the fault
strikes only while that file exists, and removes it: once.
"""

import os
import signal
import time
from typing import Any

from plexrl_worker.engine.errors import Aborted, InvalidArgument, OutOfMemory
from plexrl_worker.engine.port import Control


class Faults:
    """The faults of one engine."""

    def __init__(self, orders: list[dict[str, Any]]) -> None:
        self._orders = orders
        self._leaked: list[bytearray] = []

    def holds(self, function: str) -> bool:
        """Whether a function is not to be gone on with for now."""
        held = (order for order in self._orders if order["fault"] == "held" and order["function"] == function)
        return any(os.path.exists(order["flag_file"]) for order in held)

    def strike(self, function: str, control: Control | None) -> None:
        """Commits the faults that are ordered for a function."""
        for order in self._orders:
            if order["function"] != function or order["fault"] == "held":
                continue
            if flag_file := order.get("flag_file"):
                try:
                    os.unlink(flag_file)
                except FileNotFoundError:
                    continue
            self._commit(function, order, control)

    def _commit(self, function: str, order: dict[str, Any], control: Control | None) -> None:
        match order["fault"]:
            case "crash":
                os.kill(os.getpid(), signal.SIGKILL)
            case "exit":
                os._exit(3)
            case "hang":
                while True:
                    time.sleep(3600)
            case "slow":
                _sleep(float(order["delay_s"]), control)
            case "fail":
                raise RuntimeError(f"{function} was told to fail")
            case "out_of_memory":
                raise OutOfMemory(f"{function} was told to run out of memory")
            case "leak":
                self._leaked.append(bytearray(b"\1" * int(order["leak_bytes"])))
            case unknown:
                raise InvalidArgument(f"plexrl_fake: fault {unknown!r} is not known")


def _sleep(delay_s: float, control: Control | None) -> None:
    end_s = time.monotonic() + delay_s
    while (left_s := end_s - time.monotonic()) > 0:
        if control is not None:
            control.progress(0, 0)
            if control.aborted():
                raise Aborted("the function was aborted")
            if control.yielding():
                return
        time.sleep(min(left_s, 0.01))
