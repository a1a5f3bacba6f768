"""Numbers of a model's program order, as its client counts them.

Pure bookkeeping: knows neither calls nor locks. A number that the server refused was not used, so it is given back,
unless later numbers were taken meanwhile: then the sequence has a hole and stays broken until the server says where it
goes on.
"""


class SequenceCounter:
    """Counts the sequenced calls of one model."""

    def __init__(self, next_number: int = 1) -> None:
        self._next = next_number
        self._refused: set[int] = set()

    @property
    def next_number(self) -> int:
        """What `take` would return."""
        return self._next

    @property
    def hole(self) -> int | None:
        """The lowest refused number that later ones wait for, if any."""
        return min(self._refused, default=None)

    def take(self) -> int:
        """Takes the next number."""
        number = self._next
        self._next += 1
        return number

    def refuse(self, number: int) -> None:
        """The server did not accept `number`."""
        self._refused.add(number)
        while self._next - 1 in self._refused:
            self._next -= 1
            self._refused.discard(self._next)

    def reset(self, next_number: int) -> None:
        """The server says where the sequence goes on."""
        self._next = next_number
        self._refused.clear()
