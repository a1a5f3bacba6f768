"""Which controller and which life of the worker count. Orders and streams of any other are refused."""

from dataclasses import dataclass

from plexrl_worker.errors import NotRegistered, StaleIncarnation, StaleTerm


@dataclass
class Fences:
    """The worker's identity, this life's number (0 before registration), and the highest controller term seen."""

    worker_id: str = ""
    worker_incarnation: int = 0
    leader_term: int = 0

    def adopt(self, leader_term: int) -> None:
        """A controller of this term spoke; older ones no longer count."""
        self.leader_term = max(self.leader_term, leader_term)

    def check(self, leader_term: int, worker_incarnation: int) -> None:
        """Refuses what is older, or meant for another life; adopts a newer term.

        Raises NotRegistered, StaleIncarnation, StaleTerm.
        """
        if not self.worker_incarnation:
            raise NotRegistered("this worker is not registered yet; it will be soon")
        if worker_incarnation != self.worker_incarnation:
            raise StaleIncarnation(
                f"this is life {self.worker_incarnation} of the worker, the order is for life {worker_incarnation}"
            )
        if leader_term < self.leader_term:
            raise StaleTerm(f"a controller of term {self.leader_term} leads, the order is of term {leader_term}")
        self.adopt(leader_term)
