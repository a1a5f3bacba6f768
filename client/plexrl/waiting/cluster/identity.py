"""Names and uids of a cluster: unlike ones, and the same ones again for the same seed."""

import random
import uuid

# Letters and digits without vowels or look-alikes, so that no name spells a word.
_ALPHABET = "bcdfghjklmnpqrstvwxz2456789"
_SUFFIX_LENGTH = 5
_NAME_LIMIT = 63


class Identities:
    """A stream of names. Raises nothing: names that are taken are refused by the store, as any others."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(f"identities/{seed}")

    def uid(self) -> str:
        return str(uuid.UUID(int=self._random.getrandbits(128), version=4))

    def suffix(self, length: int = _SUFFIX_LENGTH) -> str:
        return "".join(self._random.choices(_ALPHABET, k=length))

    def generated(self, prefix: str) -> str:
        """A name from `generateName`."""
        return prefix[: _NAME_LIMIT - _SUFFIX_LENGTH] + self.suffix()
