"""The checksum that proves residency: position-sensitive, associative over aligned chunks, as fast as memory.

Definition over n bytes, read as little-endian 64-bit words w[0..], the tail padded with zero bytes:
S_j = sum of w[i] with i % LANES == j (mod 2^64);
checksum = sum over j of S_j * multiplier(j) + n * LENGTH_FACTOR (mod 2^64), multiplier(j) = (2j+1) * GOLDEN.
A flipped bit, a chunk in another's place or a shift changes it; an exchange of words whose distance is a
multiple of 512 bytes does not (chunks are compared one by one for that).
"""

import numpy as np
import numpy.typing as npt

LANES = 64
GOLDEN = 0x9E3779B97F4A7C15
LENGTH_FACTOR = 0xD1B54A32D192ED03
MULTIPLIERS: npt.NDArray[np.uint64] = (2 * np.arange(LANES, dtype=np.uint64) + np.uint64(1)) * np.uint64(
    GOLDEN
)  # (LANES,)


def checksum_reference(data: memoryview | bytes) -> int:
    """Checksum of `data`; no copy but the tail's padding. Releases the interpreter lock in its sums."""
    n = len(data)
    row = LANES * 8
    whole = n // row * row
    words = np.frombuffer(data, dtype="<u8", count=whole // 8).reshape(-1, LANES)  # (n/512, LANES)
    lanes = np.add.reduce(words, axis=0, dtype=np.uint64)  # (LANES,)
    if whole < n:
        tail = bytes(data[whole:]).ljust(row, b"\0")
        lanes = lanes + np.frombuffer(tail, dtype="<u8")
    total = int(np.add.reduce(lanes * MULTIPLIERS, dtype=np.uint64))
    return (total + n * LENGTH_FACTOR) % (1 << 64)
