"""Writes big random models of real shapes at disk speed.

    python benchmarks/make_gguf.py SHAPE PATH [--type q8_0] [--layers N]

Weights are about N(0, 1/n_in), so that logits stay finite; the tokenizer works, so that they can be served.
Each quant type's random blocks are made once (64 MiB) and written again and again from another start.
"""

import argparse
import math
import os
import struct
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf_blocks import TYPES, random_weights
from gguf_shapes import SHAPES, Choose, Shape, Tensor, choose_type, tokenizer_keys

from streamer.gguf.kinds import require_model
from streamer.gguf.quants import QuantType, dequantize, nbytes_of
from streamer.gguf.reader import read_directory
from streamer.models.registry import describe

ALIGNMENT = 32
POOL_NBYTES = 64 << 20
WRITE_NBYTES = 16 << 20
WRITERS = 4
FILE_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 7, "q4_k": 14, "q4_k_m": 15, "bf16": 32}
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Placed:
    tensor: Tensor
    type: QuantType
    nbytes: int
    offset: int  # from the start of the data


# ---- header ------------------------------------------------------------------------------------------------


def _text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def pack_value(value: object) -> bytes:
    """Type and value: bool, u32, f32, string, arrays of strings or of i32."""
    match value:
        case bool():
            return struct.pack("<IB", 7, value)
        case int():
            return struct.pack("<II", 4, value)
        case float():
            return struct.pack("<If", 6, value)
        case str():
            return struct.pack("<I", 8) + _text(value)
        case [str(), *_]:
            return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_text, value))
        case list():
            return struct.pack("<IIQ", 9, 5, len(value)) + np.array(value, dtype="<i4").tobytes()
    raise TypeError(f"no GGUF type for {value!r}")


def pack_header(keys: dict[str, object], placed: list[Placed]) -> bytes:
    parts = [b"GGUF", struct.pack("<IQQ", 3, len(placed), len(keys))]
    parts += [_text(key) + pack_value(value) for key, value in keys.items()]
    for item in placed:
        shape = item.tensor.shape
        parts.append(_text(item.tensor.name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape))
        parts.append(struct.pack("<IQ", item.type, item.offset))
    head = b"".join(parts)
    return head + bytes(-len(head) % ALIGNMENT)


def all_keys(name: str, type_name: str, shape: Shape) -> dict[str, object]:
    general = {
        "general.architecture": shape.architecture,
        "general.type": "model",
        "general.name": f"random {name} {type_name}",
        "general.alignment": ALIGNMENT,
        "general.quantization_version": 2,
        "general.file_type": FILE_TYPES.get(type_name, FILE_TYPES["q8_0"]),
    }
    own = {f"{shape.architecture}.{key}": value for key, value in shape.keys().items()}
    return general | own | tokenizer_keys(shape)


def place(shape: Shape, choose: Choose) -> list[Placed]:
    placed, offset = [], 0
    for tensor in shape.tensors():
        is_matrix = tensor.fill in ("matrix", "embedding")
        type = choose(tensor) if is_matrix else QuantType.F32
        if tensor.shape[0] % type.block_elements:
            type = QuantType.Q8_0  # as llama-quantize: a row that is no multiple of 256 gets a smaller block
        nbytes = nbytes_of(type, tensor.shape)
        placed.append(Placed(tensor, type, nbytes, offset))
        offset += -(-nbytes // ALIGNMENT) * ALIGNMENT
    return placed


# ---- contents ----------------------------------------------------------------------------------------------


def small_tensor(tensor: Tensor, shape: Shape, rng: np.random.Generator) -> Bytes:
    """F32 vectors that are no matrices, with values a trained model could have."""
    n = tensor.n_elements
    match tensor.fill:
        case "norm":
            values = 1 + 0.1 * rng.standard_normal(n)
        case "router":
            values = rng.standard_normal(n) / math.sqrt(tensor.shape[0])
        case "conv":
            values = rng.standard_normal(n) / 2
        case "decay":
            values = -rng.uniform(1, 16, n)
        case "dt":
            values = np.log(np.expm1(rng.uniform(1e-3, 1e-1, n)))  # softplus gives the step back
        case "rope_freqs":
            values = llama3_factors(shape.head_dim, shape.rope_base)
        case other:
            raise ValueError(other)
    return values.astype("<f4").view(np.uint8)


def llama3_factors(head_dim: int, base: float) -> npt.NDArray[np.float64]:
    """Llama 3.1's: factor 8, low 1, high 4, original context 8192."""
    wavelengths = 2 * np.pi * base ** (2 * np.arange(head_dim // 2) / head_dim)
    smooth = np.clip((8192 / wavelengths - 1) / 3, 0, 1)
    return 1 / ((1 - smooth) / 8 + smooth)


class Pools:
    """Random blocks by quant type and row length, made on first use and read cyclically."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._pools: dict[tuple[QuantType, float], Bytes] = {}

    def get(self, type: QuantType, std: float, wanted_nbytes: int) -> Bytes:
        key = (type, std)
        nbytes = min(POOL_NBYTES, wanted_nbytes) // type.block_nbytes * type.block_nbytes
        if key not in self._pools or len(self._pools[key]) < nbytes:
            n_elements = nbytes // type.block_nbytes * type.block_elements
            self._pools[key] = random_weights(type, n_elements, std, self._rng)
        return self._pools[key]


def pieces(pool: Bytes, start: int, nbytes: int) -> Iterator[tuple[int, Bytes]]:
    """`nbytes` of the pool read cyclically from `start`: (offset, bytes) of at most WRITE_NBYTES."""
    done = 0
    while done < nbytes:
        at = (start + done) % len(pool)
        piece = pool[at : at + min(WRITE_NBYTES, nbytes - done)]
        yield done, piece
        done += len(piece)


def write_all(descriptor: int, offset: int, data: Bytes) -> None:
    view = memoryview(data)
    while len(view):
        count = os.pwrite(descriptor, view, offset)
        view, offset = view[count:], offset + count


def write_model(path: Path, name: str, type_name: str, shape: Shape, seed: int = 0) -> int:
    """Write the file; its size. Memory: 64 MiB for each pair of quant type and row length."""
    rng = np.random.default_rng(seed)
    placed = place(shape, choose_type(type_name, shape))
    header = pack_header(all_keys(name, type_name, shape), placed)
    total = len(header) + placed[-1].offset + placed[-1].nbytes
    pools = Pools(rng)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        os.posix_fallocate(descriptor, 0, total)
        write_all(descriptor, 0, np.frombuffer(header, dtype=np.uint8))
        with ThreadPoolExecutor(WRITERS) as writers:
            pending = []
            for item in placed:
                begin = len(header) + item.offset
                if item.tensor.fill in ("matrix", "embedding"):
                    # an embedding's rows have the size of a normed activation, other rows map such to such
                    std = 1.0 if item.tensor.fill == "embedding" else 1 / math.sqrt(item.tensor.shape[0])
                    data = pools.get(item.type, std, item.nbytes)
                    start = int(rng.integers(len(data) // item.type.block_nbytes)) * item.type.block_nbytes
                else:
                    data, start = small_tensor(item.tensor, shape, rng), 0
                for at, piece in pieces(data, start, item.nbytes):
                    pending.append(writers.submit(write_all, descriptor, begin + at, piece))
            for future in pending:
                future.result()
    finally:
        os.close(descriptor)
    return total


def check_model(path: Path) -> None:
    """The reader opens it, the registry asks for every tensor and no other, the first weights are finite."""
    directory = read_directory(path)
    require_model(directory)
    wanted = {spec.name: spec for spec in describe(directory).specs()}
    unknown = set(directory.tensors) - set(wanted)
    missing = {name for name, spec in wanted.items() if not spec.optional} - set(directory.tensors)
    if unknown or missing:
        raise SystemExit(f"{path}: unknown {sorted(unknown)[:3]}, missing {sorted(missing)[:3]}")
    with open(path, "rb") as file:
        for info in directory.tensors.values():
            rows = min(4, info.shape[1]) if len(info.shape) > 1 else 1
            file.seek(info.offset)
            part = (info.shape[0], rows)
            values = dequantize(info.type, file.read(nbytes_of(info.type, part)), part)
            if not np.isfinite(values).all():
                raise SystemExit(f"{path}: {info.name}: weights are not finite")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a random model of a real shape.")
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("path", type=Path)
    types = [t.name.lower() for t in TYPES]
    parser.add_argument("--type", choices=[*types, "q4_k_m", "ffn_q8_0"], help="of the matrices")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    shape = SHAPES[arguments.shape]
    if arguments.layers:
        shape = replace(shape, n_layers=arguments.layers)
    begin = time.perf_counter()
    nbytes = write_model(arguments.path, arguments.shape, arguments.type or shape.type, shape, arguments.seed)
    seconds = time.perf_counter() - begin
    check_model(arguments.path)
    print(f"{arguments.path}: {nbytes / 1e9:.2f} GB in {seconds:.1f} s, {nbytes / 1e9 / seconds:.2f} GB/s")


if __name__ == "__main__":
    sys.exit(main())
