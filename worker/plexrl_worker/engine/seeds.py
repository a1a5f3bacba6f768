"""Random streams of generate. Pure; knows nothing of engines."""

import hashlib
import struct


def completion_seed(seed: int, prompt_index: int, completion_index: int) -> int:
    """Seed of one completion's stream, so that it does not depend on what else is in the batch.

    The first 8 bytes, little-endian, without the sign bit, of BLAKE2b over the three numbers as little-endian
    (uint64, uint32, uint32).

    >>> completion_seed(7, 0, 0) == completion_seed(7, 0, 0)
    True
    >>> completion_seed(7, 0, 1) == completion_seed(7, 1, 0)
    False
    """
    digest = hashlib.blake2b(struct.pack("<QII", seed, prompt_index, completion_index), digest_size=8).digest()
    return int.from_bytes(digest, "little") & (2**63 - 1)
