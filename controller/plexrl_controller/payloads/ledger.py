"""What is stored, for whom, and who still needs it. In memory, no I/O; shared by the payload stores."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from hashlib import sha256 as hash_of

from plexrl_controller.domain.errors import InvalidArgument, NotFound, ResourceExhausted
from plexrl_controller.domain.ids import Tenant
from plexrl_controller.domain.records import Payload

_SHA256 = re.compile(r"[0-9a-f]{64}")

Key = tuple[str, str]
"""Tenant's name (or what stands for it) and content hash."""


def checked_sha256(sha256: str) -> str:
    """A hash that may become a name. Raises InvalidArgument when it is not 64 lower-case hexadecimal digits."""
    if _SHA256.fullmatch(sha256) is None:
        raise InvalidArgument("a payload's hash is 64 lower-case hexadecimal digits of SHA-256", reason="PAYLOAD_HASH")
    return sha256


def is_digest(name: str) -> bool:
    """Whether a file or object may be one of ours."""
    return _SHA256.fullmatch(name) is not None


def owner_of(tenant: Tenant) -> str:
    """What stands for a tenant in names outside: a digest, never the tenant's own words."""
    return hash_of(tenant.encode()).hexdigest()


class Ledger:
    """Sizes, references and quotas. `reserve` goes before the bytes are written, `settle` or `cancel` after."""

    def __init__(self, quota_bytes: int, max_payload_bytes: int) -> None:
        self.quota_bytes = quota_bytes
        self._max_payload_bytes = max_payload_bytes
        self._sizes: dict[Key, int] = {}
        self._references: Counter[Key] = Counter()
        self._used: Counter[str] = Counter()
        self._owners: defaultdict[str, set[str]] = defaultdict(set)

    def used_bytes(self, owner: str) -> int:
        """Stored and reserved bytes of an owner."""
        return self._used[owner]

    def size(self, key: Key) -> int:
        """Size of stored content. Raises NotFound."""
        if key not in self._sizes:
            raise NotFound(f"no stored payload {key[1]}", reason="PAYLOAD_NOT_FOUND")
        return self._sizes[key]

    def holds(self, owner: str | None, sha256: str) -> bool:
        """Whether the owner, or with None anybody, has stored content of that hash."""
        return sha256 in self._owners if owner is None else (owner, sha256) in self._sizes

    def key(self, owner: str | None, sha256: str) -> Key:
        """The key of stored content, of any owner with None. Raises NotFound."""
        if owner is None:
            owner = next(iter(self._owners.get(sha256, ())), "")
        self.size((owner, sha256))
        return owner, sha256

    def find(self, owner: str | None, sha256: str) -> Payload:
        """What names stored content, of any owner with None. Raises NotFound."""
        return Payload(sha256, self.size(self.key(owner, sha256)))

    def found(self, key: Key, size_bytes: int) -> None:
        """Content of an earlier life, which nobody holds yet."""
        self._sizes[key] = size_bytes
        self._owners[key[1]].add(key[0])
        self._used[key[0]] += size_bytes

    def reserve(self, owner: str, more_bytes: int, payload_bytes: int, *, beyond_quota: bool = False) -> None:
        """Claims `more_bytes` for a payload that has `payload_bytes` with them. Raises ResourceExhausted."""
        if payload_bytes > self._max_payload_bytes:
            raise _exhausted("a payload may have", self._max_payload_bytes, "PAYLOAD_TOO_LARGE")
        if not beyond_quota and self._used[owner] + more_bytes > self.quota_bytes:
            raise _exhausted("the tenant's stored payloads may have", self.quota_bytes, "PAYLOAD_QUOTA")
        self._used[owner] += more_bytes

    def cancel(self, owner: str, reserved_bytes: int) -> None:
        """Gives a reservation back."""
        self._used[owner] -= reserved_bytes

    def settle(self, key: Key, size_bytes: int) -> None:
        """Turns a reservation into stored content with one more reference."""
        if key in self._sizes:
            self._used[key[0]] -= size_bytes
        self._sizes[key] = size_bytes
        self._owners[key[1]].add(key[0])
        self._references[key] += 1

    def retain(self, key: Key) -> None:
        """One more reference. Raises NotFound."""
        self.size(key)
        self._references[key] += 1

    def release(self, key: Key) -> bool:
        """One reference less; True when it was the last, and the content is no longer known here. Raises NotFound."""
        if self._references[key] <= 0:
            del self._references[key]
            raise NotFound(f"nobody holds payload {key[1]}", reason="PAYLOAD_NOT_FOUND")
        self._references[key] -= 1
        if self._references[key] > 0:
            return False
        self.forget(key)
        return True

    def forget(self, key: Key) -> None:
        """Content that is being deleted."""
        del self._references[key]
        self._used[key[0]] -= self._sizes.pop(key)
        self._owners[key[1]].discard(key[0])
        if not self._owners[key[1]]:
            del self._owners[key[1]]

    def unreferenced(self) -> Iterable[Key]:
        """Content that nobody holds."""
        return [key for key in self._sizes if self._references[key] <= 0]


def _exhausted(what: str, limit_bytes: int, reason: str) -> ResourceExhausted:
    return ResourceExhausted(
        f"{what} at most {limit_bytes} bytes", reason=reason, metadata={"limit_bytes": str(limit_bytes)}
    )
