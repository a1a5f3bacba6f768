"""Groups without affinity: a call runs on whichever of several alike groups is free, and its state follows it."""

from collections.abc import Callable

from plexrl_controller.simulation.engine import Simulation
from plexrl_controller.simulation.pools import Call, Group, Mode, Resident, Totals


class FamilyGroup(Group):
    """`servers` alike groups with one queue, first come, first served. Charged and accounted as one.

    `migrate_s` tells how long it takes to bring a state of so many bytes per GPU to a group that does not have it.
    """

    def __init__(
        self,
        simulation: Simulation,
        totals: Totals,
        name: str,
        server_gpus: int,
        servers: int,
        migrate_s: Callable[[float], float],
    ) -> None:
        super().__init__(simulation, totals, name, server_gpus * servers)
        self.migrate_s = migrate_s
        self.server_gpus = server_gpus
        self._queue: list[Call] = []
        self._free: list[int] = list(range(servers))
        self._next_server = servers
        self._last: dict[int, Resident] = {}
        self._modes: dict[int, Mode] = {}

    @property
    def unit_gpus(self) -> int:
        """Those of one of its groups."""
        return self.server_gpus

    @property
    def servers(self) -> int:
        """How many groups the family has."""
        return self.gpus // self.server_gpus

    def grow(self) -> None:
        """Adds a group."""
        self.charged_gpu_s()
        self._account()
        self.gpus += self.server_gpus
        self._free.append(self._next_server)
        self._next_server += 1
        self._dispatch()

    def shrink(self) -> bool:
        """Removes a free group; returns whether there was one."""
        if not self._free:
            return False
        self.charged_gpu_s()
        self._account()
        self._last.pop(self._free.pop(), None)
        self.gpus -= self.server_gpus
        return True

    def submit(self, call: Call) -> None:
        """Queues the call."""
        self._queue.append(call)
        self._dispatch()

    def close(self) -> float:
        """Ends the accounts; the lifetime is in seconds of one server."""
        self._account()
        return sum(self.spent_s.values())

    def _account(self) -> None:
        """Charges the time since the last change to what each server did."""
        now = self.simulation.now
        elapsed = now - self.mode_since
        for mode in self._modes.values():
            self.spent_s[mode] += elapsed
        self.spent_s[Mode.IDLE] += elapsed * (self.servers - len(self._modes))
        self.mode_since = now

    def _dispatch(self) -> None:
        while self._queue and self._free:
            call = self._queue.pop(0)
            home = [server for server in self._free if self._last.get(server) is call.resident]
            server = home[0] if home else self._free[0]
            self._free.remove(server)
            self._account()
            setup_s = 0.0 if home else self.migrate_s(call.resident.state_for(call).bytes)
            self.totals.waits_s.append(self.simulation.now - call.ready_since)
            self.totals.setups_s.append(setup_s)
            self._last[server] = call.resident
            self._modes[server] = Mode.SWAP
            if setup_s > 0.0:
                self.totals.swaps += 1
            self.simulation.at(self.simulation.now + setup_s, self._start, (server, call))

    def _start(self, what: tuple[int, Call]) -> None:
        server, call = what
        self._account()
        self._modes[server] = Mode.BUSY
        self.simulation.at(self.simulation.now + call.remaining_s, self._finish, what)

    def _finish(self, what: tuple[int, Call]) -> None:
        server, call = what
        self._account()
        del self._modes[server]
        self._free.append(server)
        self._resume(call)
        self._dispatch()
