"""From a file's bytes in a landing area to the resident layout: planes, or bf16 for types without a product.

The planes' sizes and order are in `streamer.plan.layouts`; what their bits mean, in `quants.cuh` and,
executable, in `planes_reference`. The kernels only read the landing area: a checksum of it may run beside.
"""

import ctypes
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from streamer.device.base import Buffer, CopyKind, Stream
from streamer.gguf.quants import QuantType
from streamer.kernels.launch import KernelSource, ModuleSpec
from streamer.plan.layouts import PLANES, plane_offsets, resident_nbytes
from streamer.plan.plan import Layout

Bytes = npt.NDArray[np.uint8]

THREADS = 256
MAX_BLOCKS = 132 * 32  # more work than that is taken in turns
_SAME_MOVE = {QuantType.IQ4_NL: QuantType.Q4_0}  # laid out alike
# Types decoded at load, with the gguf.quants class that holds their codebook, if any.
CODEBOOKS: dict[QuantType, str | None] = {
    QuantType.IQ1_S: "IQ1_S",
    QuantType.IQ1_M: "IQ1_S",
    QuantType.IQ2_XXS: "IQ2_XXS",
    QuantType.IQ2_XS: "IQ2_XS",
    QuantType.IQ2_S: "IQ2_S",
    QuantType.IQ3_XXS: "IQ3_XXS",
    QuantType.IQ3_S: "IQ3_S",
    QuantType.TQ1_0: None,
    QuantType.TQ2_0: None,
    QuantType.NVFP4: None,
    QuantType.Q1_0: None,
    QuantType.F64: None,
}
_OUT = {"bf16": "__nv_bfloat16", "f32": "float"}


class PlanesParams(ctypes.Structure):
    """planes.cu"""

    _fields_ = (("source", ctypes.c_uint64), ("planes", ctypes.c_uint64 * 4), ("n_chunks", ctypes.c_uint32))


class CodebookParams(ctypes.Structure):
    """codebooks.cu"""

    _fields_ = (
        ("source", ctypes.c_uint64),
        ("grid", ctypes.c_uint64),
        ("signs", ctypes.c_uint64),
        ("out", ctypes.c_uint64),
        ("n_groups", ctypes.c_uint32),
    )


class TableDevice(Protocol):
    """What uploading codebooks needs of a device."""

    def allocate(self, nbytes: int, *, what: str = "") -> Buffer: ...
    def upload(
        self, buffer: Buffer, offset: int, source: int, nbytes: int, *, stream: Stream, kind: CopyKind
    ) -> None: ...


def module_of(type: QuantType, layout: Layout) -> ModuleSpec | None:
    """What must be compiled to lay out weights of `type`; None: the file's bytes stay as they are."""
    match layout:
        case Layout.FILE:
            return None
        case Layout.PLANES:
            return ModuleSpec("planes.cu", (_move(type),))
        case Layout.BF16:
            return ModuleSpec("codebooks.cu", (_decode(type, "bf16"),))


class WeightLayouter:
    """Rearranges landed weights, on the stream it is given. Owns the codebooks it uploaded until `close`."""

    def __init__(self, device: TableDevice, store: KernelSource) -> None:
        self._device, self._store = device, store
        self._kernels: dict[str, Any] = {}
        self._tables: dict[str, Buffer] = {}
        self._arrays: list[Bytes] = []  # sources of asynchronous uploads

    def apply(
        self, layout: Layout, type: QuantType, source: int, target: int, n_elements: int, *, stream: Stream
    ) -> None:
        """Device bytes at `source` (the file's) -> `target` in `layout` (`resident_nbytes`, 16-byte aligned).

        The two must not overlap. Ordered on `stream`; the source may be reused after an event recorded there.
        """
        if layout is Layout.PLANES:
            self._move(type, source, target, n_elements, stream)
        else:
            assert layout is Layout.BF16, layout
            self.decode(type, source, target, n_elements, stream=stream)

    def decode(
        self,
        type: QuantType,
        source: int,
        target: int,
        n_elements: int,
        *,
        stream: Stream,
        dtype: str = "bf16",
    ) -> None:
        """A codebook type's file bytes to `dtype` ("bf16" or "f32")."""
        grid, signs = self._codebook(type, stream)
        params = CodebookParams(source, grid, signs, target, n_elements // 8)
        kernel = self._kernel("codebooks.cu", _decode(type, dtype), CodebookParams)
        kernel(_grid(n_elements // 8), THREADS, params, stream=stream.handle, dependent=False)

    def close(self) -> None:
        for table in self._tables.values():
            table.close()
        self._tables.clear()

    def _move(self, type: QuantType, source: int, target: int, n_elements: int, stream: Stream) -> None:
        planes = [target + offset for offset in plane_offsets(type, n_elements)]
        n_chunks = n_elements // type.block_elements * PLANES[type][0] // 16
        params = PlanesParams(source, (ctypes.c_uint64 * 4)(*planes), n_chunks)
        kernel = self._kernel("planes.cu", _move(type), PlanesParams)
        kernel(_grid(n_chunks), THREADS, params, stream=stream.handle, dependent=False)

    def _kernel(self, source: str, name: str, params: type) -> Any:
        if name not in self._kernels:
            self._kernels[name] = self._store.kernel(source, name, (params,))
        return self._kernels[name]

    def _codebook(self, type: QuantType, stream: Stream) -> tuple[int, int]:
        """Addresses of the type's grid and of the sign patterns."""
        name = CODEBOOKS[type]
        if name is None:
            return 0, 0
        if name not in self._tables:
            content = np.concatenate([sign_table(), grid_table(name)])
            table = self._device.allocate(content.nbytes, what=f"codebook {name}")
            self._device.upload(
                table, 0, content.ctypes.data, content.nbytes, stream=stream, kind=CopyKind.TABLES
            )
            self._tables[name] = table
            self._arrays.append(content)
        return self._tables[name].handle + 128, self._tables[name].handle


def grid_table(name: str) -> Bytes:
    """A codebook of gguf.quants as signed bytes, entries in order."""
    import gguf.quants

    book = getattr(gguf.quants, name)
    book.init_grid()
    return np.ascontiguousarray(book.grid.reshape(-1).astype(np.int8).view(np.uint8))


def sign_table() -> Bytes:
    """Seven sign bits -> eight: the eighth makes their number even. (128,)"""
    codes = np.arange(128, dtype=np.uint8)
    parity = np.unpackbits(codes[:, None], axis=1).sum(axis=1).astype(np.uint8) & 1
    return np.asarray(codes | parity << 7, np.uint8)


def planes_reference(type: QuantType, data: Bytes) -> Bytes:
    """The file bytes of whole quant blocks as they lie in planes, gaps between planes zero. For tests."""
    blocks = np.ascontiguousarray(data).reshape(-1, type.block_nbytes)  # (n_blocks, block_nbytes)
    n_elements = len(blocks) * type.block_elements
    out = np.zeros(resident_nbytes(Layout.PLANES, type, n_elements), np.uint8)
    planes = _REFERENCES[type](blocks)
    for offset, nbytes, plane in zip(plane_offsets(type, n_elements), PLANES[type], planes, strict=True):
        assert plane.shape == (len(blocks), nbytes), (type.name, plane.shape)
        out[offset : offset + plane.size] = plane.reshape(-1)
    return out


def _grid(n: int) -> tuple[int, int, int]:
    return min(MAX_BLOCKS, -(-n // THREADS)), 1, 1


def _move(type: QuantType) -> str:
    return f"to_planes<Move{_SAME_MOVE.get(type, type).name}>"


def _decode(type: QuantType, dtype: str) -> str:
    return f"decode_blocks<{type.name}, {_OUT[dtype]}>"


def _cut(*ends: int) -> Any:
    """Planes that are runs of the block's bytes: (start, end) pairs flattened, in plane order."""
    return lambda b: [b[:, start:end] for start, end in zip(ends[::2], ends[1::2], strict=True)]


def _bits_to_words(bits: Bytes, width: int) -> Bytes:
    """(.., 16 or 32) values of `width` bits -> words: element e goes to byte e & 3, bit width * (e >> 2)."""
    n = bits.shape[-1]
    grouped = bits.reshape(*bits.shape[:-1], n * width // 32, 32 // width // 4, 4).astype(
        np.uint32
    )  # word, shift, byte
    shifts = (8 * np.arange(4)[None, :] + width * np.arange(32 // width // 4)[:, None]).astype(np.uint32)
    words = np.bitwise_or.reduce(np.bitwise_or.reduce(grouped << shifts, axis=-1), axis=-1).astype("<u4")
    return np.ascontiguousarray(words).view(np.uint8)


def _fifth(high: Bytes) -> Bytes:
    return _bits_to_words(np.unpackbits(np.ascontiguousarray(high), axis=1, bitorder="little"), 1)


def _q5_0(b: Bytes) -> list[Bytes]:
    return [b[:, 6:22], _fifth(b[:, 2:6]), b[:, :2]]


def _q5_1(b: Bytes) -> list[Bytes]:
    return [b[:, 8:24], _fifth(b[:, 4:8]), b[:, :4]]


def _by_chunk(values: Any) -> Any:
    """(n, 2 halves, 4 runs, 2 sixteenths, ..) -> (n, half, sixteenth, run, ..): the chunks of 2-bit types."""
    return np.moveaxis(values, 3, 2)


def _q2_k(b: Bytes) -> list[Bytes]:
    scales = _by_chunk(b[:, :16].reshape(-1, 2, 4, 2)).reshape(-1, 16)
    return [b[:, 16:80], scales, b[:, 80:84]]


def _pack6(values: Bytes) -> Bytes:
    """(.., 4) six-bit values -> (.., 3) bytes, lowest first."""
    words = np.bitwise_or.reduce(values.astype(np.uint32) << np.array([0, 6, 12, 18], np.uint32), axis=-1)
    return np.ascontiguousarray(words.astype("<u4"))[..., None].view(np.uint8)[..., :3]


def _q3_k(b: Bytes) -> list[Bytes]:
    n = len(b)
    mask = (b[:, None, :32] >> np.arange(8, dtype=np.uint8)[:, None]) & 1  # (n, 8 runs of 32, 32)
    chunks = _by_chunk(mask.reshape(n, 2, 4, 2, 16))  # (n, half, sixteenth, run, 16)
    high = _bits_to_words(np.ascontiguousarray(chunks).reshape(n, 4, 2, 32), 1).reshape(n, 32)
    packed, scales = b[:, 96:108], np.empty((n, 16), np.uint8)
    for i in range(16):
        low = packed[:, i] & 15 if i < 8 else packed[:, i - 8] >> 4
        scales[:, i] = low | ((packed[:, 8 + i % 4] >> (2 * (i // 4))) & 3) << 4
    six = _pack6(_by_chunk(scales.reshape(n, 2, 4, 2)).reshape(n, 4, 4)).reshape(n, 12)
    return [b[:, 32:96], high, six, b[:, 108:110]]


def _k_header(b: Bytes) -> Bytes:
    s = b[:, 4:16]
    scales = np.concatenate([s[:, :4] & 63, s[:, 8:] & 15 | (s[:, :4] >> 6) << 4], axis=1)  # (n, 8)
    mins = np.concatenate([s[:, 4:8] & 63, s[:, 8:] >> 4 | (s[:, 4:8] >> 6) << 4], axis=1)
    pairs = np.stack([scales, mins], axis=-1).reshape(len(b), 4, 4)  # scale, min, scale, min
    return np.concatenate([b[:, :4], _pack6(pairs).reshape(len(b), 12)], axis=1)


def _q4_k(b: Bytes) -> list[Bytes]:
    return [b[:, 16:144], _k_header(b)]


def _q5_k(b: Bytes) -> list[Bytes]:
    n = len(b)
    bits = (b[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]) & 1  # (n, 8 sub-blocks, 32)
    chunks = bits.reshape(n, 4, 2, 2, 16).transpose(0, 1, 3, 2, 4)  # (n, pair, half, low/high, 16)
    high = _bits_to_words(np.ascontiguousarray(chunks).reshape(n, 8, 32), 1).reshape(n, 32)
    return [b[:, 48:176], high, _k_header(b)]


def _q6_k(b: Bytes) -> list[Bytes]:
    n = len(b)
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    top = (b[:, 128:192].reshape(n, 2, 1, 32) >> shifts) & 3  # (n, half, quarter, 32)
    chunks = top.reshape(n, 2, 2, 2, 2, 16).transpose(0, 1, 3, 4, 2, 5)  # (n, half, a, h, low/high, 16)
    high = _bits_to_words(np.ascontiguousarray(chunks).reshape(n, 8, 2, 16), 2).reshape(n, 64)
    scales = b[:, 192:208].reshape(n, 2, 2, 2, 2).transpose(0, 1, 3, 4, 2).reshape(n, 16)
    return [b[:, :128], high, scales, b[:, 208:210]]


_REFERENCES: dict[QuantType, Any] = {
    QuantType.Q8_0: _cut(2, 34, 0, 2),
    QuantType.Q4_0: _cut(2, 18, 0, 2),
    QuantType.IQ4_NL: _cut(2, 18, 0, 2),
    QuantType.Q4_1: _cut(4, 20, 0, 4),
    QuantType.Q5_0: _q5_0,
    QuantType.Q5_1: _q5_1,
    QuantType.MXFP4: _cut(1, 17, 0, 1),
    QuantType.Q2_K: _q2_k,
    QuantType.Q3_K: _q3_k,
    QuantType.Q4_K: _q4_k,
    QuantType.Q5_K: _q5_k,
    QuantType.Q6_K: _q6_k,
    QuantType.IQ4_XS: _cut(8, 136, 0, 8),
}
