"""Paged attention, rotation and the cache write against numpy on fresh random inputs.

Keys and values are bf16 (8 bits) and, in prefill, so are queries and probabilities. The reference sees the
same rounded keys and values, so decode differs by the order of float32 sums only (NMSE <= 1e-9) and prefill
by the rounding of queries and probabilities (NMSE <= 5e-5).
"""

from typing import Any

import numpy as np
import pytest

from streamer.kernels.attention import attention_reference
from streamer.kernels.ops import Rope, RopePairing
from streamer.kernels.rope import inverse_frequencies, rope_reference, rotations

pytestmark = pytest.mark.cuda


class Paged:
    """Random keys and values of several sequences, scattered over pages."""

    def __init__(
        self, bench: Any, rng: np.random.Generator, lengths: list[int], n_kv: int, hd: int, page: int = 32
    ) -> None:
        self.bench, self.page, self.lengths = bench, page, lengths
        self.max_pages = -(-max(lengths) // page) + 1
        need = [-(-n // page) for n in lengths]
        order = rng.permutation(sum(need) + 3)
        self.table = np.full((len(lengths), self.max_pages), -(2**30), np.int32)
        at = 0
        for i, n in enumerate(need):
            self.table[i, :n] = order[at : at + n]
            at += n
        self.keys = bench.to_bf16(rng.standard_normal((len(order), n_kv, page, hd)))
        self.values = bench.to_bf16(rng.standard_normal((len(order), n_kv, page, hd)))

    def of(self, sequence: int, stored: np.ndarray) -> np.ndarray:
        """(n_kv, length, hd) float32 of one sequence."""
        n = self.lengths[sequence]
        pages = self.table[sequence, : -(-n // self.page)]
        x = self.bench.from_bf16(stored[pages])  # (n_pages, n_kv, page, hd)
        return x.transpose(1, 0, 2, 3).reshape(x.shape[1], -1, x.shape[3])[:, :n]


DECODE = [  # n_kv, group, head_dim, window, softcap, gated
    (8, 4, 128, 0, 0.0, False),
    (3, 3, 64, 0, 0.0, False),
    (1, 4, 256, 512, 0.0, False),
    (4, 6, 256, 0, 0.0, True),
    (2, 2, 16, 0, 0.0, False),
    (2, 2, 24, 5, 0.0, False),
    (2, 7, 64, 0, 30.0, False),
    (2, 2, 80, 0, 0.0, False),
    (2, 8, 128, 0, 0.0, False),
    (1, 16, 128, 0, 0.0, False),
]


@pytest.mark.parametrize(("n_kv", "group", "hd", "window", "softcap", "gated"), DECODE)
def test_decode_attention(
    bench: Any, n_kv: int, group: int, hd: int, window: int, softcap: float, gated: bool
) -> None:
    rng = np.random.default_rng(hd * 100 + group)
    lengths = [1, 31, 32, 33, 64, 65, 700, 1999]
    paged = Paged(bench, rng, lengths, n_kv, hd)
    n, n_heads, splits = len(lengths), n_kv * group, 16
    q = rng.standard_normal((n + 2, n_heads, hd)).astype(np.float32) * 2
    gate = rng.standard_normal((n + 2, n_heads, hd)).astype(np.float32)
    rows = np.array([*range(n), -1, -1], np.int32)
    parts = -(-group // 8) if group > 8 else 1
    lanes = next(x for x in (2, 4, 8, 16, 32) if x * 8 >= hd)
    out = bench.poisoned((n + 2, n_heads, hd))
    counters = bench.put(np.zeros((n + 2) * n_kv * parts, np.uint32))
    partial = bench.poisoned(((n + 2) * n_kv * splits * group, hd + 2))
    span = np.array([*range(n), -1, -1], np.int32)
    positions = np.array([*(x - 1 for x in lengths), 0, 0], np.int32)
    for _ in range(2):  # the second run sees the counters the first left
        bench.launch(
            "attention_decode.cu",
            f"attention_decode<__nv_bfloat16, {lanes}, {group // parts}>",
            (n_kv * parts, splits, n + 2),
            256,
            bench.put(q),
            out,
            bench.put(gate) if gated else None,
            bench.put(paged.keys),
            bench.put(paged.values),
            bench.put(paged.table),
            bench.put(rows),
            bench.put(span),
            bench.put(positions),
            partial,
            counters,
            parts,
            hd,
            paged.page,
            paged.max_pages,
            hd**-0.5,
            softcap,
            window,
            shared=8 * (group // parts) * (hd + 2) * 4,
        )
    got = bench.get(out, (n + 2, n_heads, hd))
    assert (bench.get(counters, ((n + 2) * n_kv * parts,), np.uint32) == 0).all()
    for i in range(n):
        want = attention_reference(
            q[i : i + 1],
            paged.of(i, paged.keys)[:, -(window or 10**6) :],
            paged.of(i, paged.values)[:, -(window or 10**6) :],
            scale=hd**-0.5,
            softcap=softcap or None,
        ).reshape(n_heads, hd)
        if gated:
            want = want / (1 + np.exp(-gate[i]))
        assert bench.nmse(got[i], want) < 1e-9, lengths[i]


PREFILL = [  # head_dim, padded, tile of tokens, window, softcap, gated
    (128, 128, 64, 0, 0.0, False),
    (64, 64, 64, 0, 0.0, False),
    (256, 256, 32, 0, 0.0, True),
    (256, 256, 32, 40, 0.0, False),
    (80, 80, 64, 0, 0.0, False),
    (96, 96, 64, 17, 0.0, False),
    (24, 32, 64, 0, 30.0, False),
    (16, 16, 64, 0, 0.0, False),
]


@pytest.mark.parametrize(("hd", "padded", "tokens", "window", "softcap", "gated"), PREFILL)
def test_prefill_attention(
    bench: Any, hd: int, padded: int, tokens: int, window: int, softcap: float, gated: bool
) -> None:
    rng = np.random.default_rng(hd + window)
    n_kv, group = 2, 3
    n_heads = n_kv * group
    lengths, fresh = [5, 64, 300, 513], [5, 64, 130, 1 + 64]  # the last rows of each sequence are computed
    paged = Paged(bench, rng, lengths, n_kv, hd)
    n_rows = sum(fresh)
    q = rng.standard_normal((n_rows, n_heads, hd)).astype(np.float32)
    gate = rng.standard_normal((n_rows, n_heads, hd)).astype(np.float32)
    tiles, row = [], 0
    for i, (length, count) in enumerate(zip(lengths, fresh, strict=True)):
        tiles += [(row + at, min(64, count - at), length - count + at, i) for at in range(0, count, 64)]
        row += count
    out = bench.poisoned((n_rows, n_heads, hd))
    bench.launch(
        "attention_prefill.cu",
        f"attention_prefill<__nv_bfloat16, {padded}, {tokens}>",
        (len(tiles), n_heads),
        128,
        bench.put(q),
        out,
        bench.put(gate) if gated else None,
        bench.put(paged.keys),
        bench.put(paged.values),
        bench.put(paged.table),
        bench.put(np.array(tiles, np.int32)),
        n_heads,
        n_kv,
        hd,
        paged.page,
        paged.max_pages,
        hd**-0.5,
        softcap,
        window,
        shared=(64 + 2 * tokens) * (padded + 8) * 2,
    )
    got, row = bench.get(out, (n_rows, n_heads, hd)), 0
    for i, count in enumerate(fresh):
        want = attention_reference(
            q[row : row + count],
            paged.of(i, paged.keys),
            paged.of(i, paged.values),
            scale=hd**-0.5,
            sliding_window=window or None,
            softcap=softcap or None,
        ).reshape(count, n_heads, hd)
        if gated:
            want = want / (1 + np.exp(-gate[row : row + count]))
        assert bench.nmse(got[row : row + count], want) < 5e-5, i
        row += count


@pytest.mark.parametrize(
    ("hd", "n_rot", "pairing", "norms", "gated"),
    [
        (128, 128, RopePairing.NORM, False, False),
        (64, 64, RopePairing.NEOX, False, False),
        (256, 64, RopePairing.NEOX, True, True),
        (24, 24, RopePairing.NEOX, True, False),
        (80, 32, RopePairing.NORM, True, False),
    ],
)
def test_rotation_and_cache_write(
    bench: Any, hd: int, n_rot: int, pairing: RopePairing, norms: bool, gated: bool
) -> None:
    rng = np.random.default_rng(hd)
    n_rows, n_heads, n_kv, page, max_pages = 7, 6, 2, 32, 4
    width = 2 * hd if gated else hd
    q = rng.standard_normal((n_rows, n_heads, width)).astype(np.float32)
    k, v = rng.standard_normal((2, n_rows, n_kv, hd)).astype(np.float32)
    q_norm, k_norm = 1 + 0.1 * rng.standard_normal((2, hd)).astype(np.float32)
    span = np.array([0, 0, 1, 1, 1, 2, -1], np.int32)
    positions = np.array([31, 32, 0, 1, 2, 100, 5], np.int32)
    table = rng.permutation(12).reshape(3, max_pages).astype(np.int32)
    inverse = inverse_frequencies(Rope(pairing, n_rot, 1e4))
    keys, values = (
        bench.put(np.zeros((12, n_kv, page, hd), np.uint16)),
        bench.put(np.zeros((12, n_kv, page, hd), np.uint16)),
    )
    q_out, gate_out = bench.poisoned((n_rows, n_heads, hd)), bench.poisoned((n_rows, n_heads, hd))
    bench.launch(
        "rope.cu",
        "rope_cache_write<__nv_bfloat16>",
        (n_rows, -(-(n_heads + 2 * n_kv) // 4)),
        128,
        bench.put(q),
        bench.put(k),
        bench.put(v),
        q_out,
        gate_out if gated else None,
        keys,
        values,
        bench.put(q_norm) if norms else None,
        bench.put(k_norm) if norms else None,
        bench.put(inverse.astype(np.float32)),
        bench.put(table),
        bench.put(span),
        bench.put(positions),
        n_heads * width,
        n_kv * hd,
        n_kv * hd,
        n_heads,
        n_kv,
        hd,
        n_rot,
        int(pairing is RopePairing.NEOX),
        1.0,
        1e-6,
        1e-6,
        page,
        max_pages,
    )

    def normed(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * weight if norms else x

    turn = rotations(positions, inverse, 1.0)
    want_q = rope_reference(normed(q[..., :hd], q_norm), turn, pairing)
    want_k = rope_reference(normed(k, k_norm), turn, pairing)
    got_q = bench.get(q_out, (n_rows, n_heads, hd))[:6]
    assert bench.nmse(got_q, want_q[:6]) < 1e-10
    if gated:
        assert (bench.get(gate_out, (n_rows, n_heads, hd))[:6] == q[:6, :, hd:]).all()
    got_k, got_v = (bench.from_bf16(bench.get(x, (12, n_kv, page, hd), np.uint16)) for x in (keys, values))
    touched = 0
    for r in range(6):
        at = (table[span[r], positions[r] // page], slice(None), positions[r] % page)
        assert bench.nmse(got_k[at], want_k[r]) < 1e-5
        assert (got_v[at] == bench.from_bf16(bench.to_bf16(v[r]))).all()
        touched += n_kv * hd
    assert np.count_nonzero(got_v) == touched  # nothing else was written
