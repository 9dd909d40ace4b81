"""NVRTC: CUDA source to machine code, once; kept in a disk cache; with a resource report. Needs no GPU.

The result is a cubin (machine code for one architecture, never PTX): it loads without a compiler in the
driver and also under a driver older than the compiler. Registers and spills come from the assembler's own
report, and warnings are kept apart, so that a test on a machine without a GPU can refuse both; a warning that
a later compiler invents does not stop a user's daemon.
"""

import hashlib
import importlib.util
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from streamer.errors import DeviceNotFoundError, GgufdError
from streamer.kernels.compile_cache import CompileCache

KERNEL_DIRECTORY = Path(__file__).resolve().parent
BASE_OPTIONS = ("--std=c++17", "--ptxas-options=-v")


class KernelCompileError(GgufdError):
    """NVRTC refused a source: carries the compiler's log."""

    def __init__(self, name: str, arch: str, code: str, log: str) -> None:
        super().__init__(f"{name} for {arch}: {code}\n{log}")
        self.name, self.arch, self.code, self.log = name, arch, code, log


@dataclass(frozen=True)
class KernelResources:
    """What one kernel takes, by the assembler's report: bytes a thread, static shared memory a block."""

    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    shared_bytes: int

    @property
    def spills(self) -> bool:
        return bool(self.spill_store_bytes or self.spill_load_bytes)


@dataclass(frozen=True)
class CompiledModule:
    """Machine code of one source for one architecture."""

    name: str
    arch: str
    cubin: bytes
    symbols: Mapping[str, str]  # name expression -> symbol in the cubin; extern "C" kernels need none
    resources: Mapping[str, KernelResources]  # symbol -> what it takes
    log: str
    seconds: float  # spent compiling; 0 when it came from the cache

    @property
    def warnings(self) -> tuple[str, ...]:
        """The compiler's and the assembler's warnings, a line each."""
        return tuple(line for line in self.log.splitlines() if re.search(r"\bwarning\s*[#:]", line))

    @property
    def spilling(self) -> dict[str, KernelResources]:
        """The kernels whose registers do not suffice: they go to memory and back."""
        return {name: r for name, r in self.resources.items() if r.spills}

    def symbol(self, expression: str) -> str:
        """The cubin's name of a kernel: of a name expression given at compilation, or an extern "C" name."""
        return self.symbols.get(expression, expression)


def compile_source(
    name_or_path: str | Path,
    *,
    arch: str,
    defines: Mapping[str, str | int] | None = None,
    name_expressions: Sequence[str] = (),
    options: Sequence[str] = (),
    cache_directory: Path | None = None,
    source: str | None = None,
) -> CompiledModule:
    """Compile a .cu file (a name means one beside this file) for `arch` ("sm_90a"), or take it from cache.

    `defines` become -D options. `name_expressions` name template instances ("k<3, float>"), whose symbols
    `CompiledModule.symbol` gives. The .cuh files beside the source can be included by name. `source` replaces
    the file's text. May be called from several threads (the compiler runs without the interpreter lock) and
    several processes on one cache. Raises KernelCompileError with the log, DeviceNotFoundError without NVRTC.
    """
    path = KERNEL_DIRECTORY / name_or_path
    text = path.read_text() if source is None else source
    headers = _headers(path.parent)
    flags = (
        f"--gpu-architecture={arch}",
        *BASE_OPTIONS,
        *(f"-D{key}={value}" for key, value in sorted((defines or {}).items())),
        *options,
    )
    cache = CompileCache(cache_directory) if cache_directory is not None else None
    key = _cache_key(text, headers, flags, tuple(name_expressions))
    stored = cache.get(key) if cache is not None else None
    if stored is not None:
        return _unpack(path.name, arch, *stored)
    module = _compile(path.name, arch, text, headers, flags, tuple(name_expressions))
    if cache is not None:
        cache.put(key, {"symbols": dict(module.symbols), "log": module.log}, module.cubin)
    return module


def architecture(capability: tuple[int, int]) -> str:
    """The best target NVRTC knows for a device: (9, 0) -> "sm_90a". DeviceNotFoundError: it knows none."""
    return choose_architecture(capability, supported_architectures())


def choose_architecture(capability: tuple[int, int], supported: Sequence[int]) -> str:
    """Exactly the device's own where known, from 9.0 with its architecture-specific instructions ("a").

    Else the nearest older minor of the same major: code runs on later minors, its "a" variant does not.
    """
    major, minor = capability
    wanted = major * 10 + minor
    if wanted in supported:
        return f"sm_{wanted}a" if major >= 9 else f"sm_{wanted}"
    older = [n for n in supported if n // 10 == major and n < wanted]
    if not older:
        raise DeviceNotFoundError(
            f"NVRTC {'.'.join(map(str, nvrtc_version()))} does not know compute {major}.{minor}"
        )
    return f"sm_{max(older)}"


def supported_architectures() -> tuple[int, ...]:
    """Numbers of the targets the installed NVRTC compiles for: (75, 80, ..., 121)."""
    nvrtc = _nvrtc()
    return tuple(int(n) for n in _checked(nvrtc, "nvrtcGetSupportedArchs", *nvrtc.nvrtcGetSupportedArchs()))


@lru_cache(maxsize=1)
def nvrtc_version() -> tuple[int, int]:
    nvrtc = _nvrtc()
    code, major, minor = nvrtc.nvrtcVersion()
    _checked(nvrtc, "nvrtcVersion", code)
    return int(major), int(minor)


def declared_instances(source: str) -> tuple[str, ...]:
    """Name expressions of the template kernels in use, from the lines `// instance: k<3, float>`."""
    return tuple(re.findall(r"^\s*// instance: (\S.*?)\s*$", source, re.MULTILINE))


def parse_resources(log: str) -> dict[str, KernelResources]:
    """Kernel symbol -> resources, from the assembler's verbose log. Pure."""
    found: dict[str, KernelResources] = {}
    for block in re.split(r"Compiling entry function ", log)[1:]:
        name = re.match(r"'([^']+)'", block)
        stack = re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", block
        )
        used = re.search(r"Used (\d+) registers", block)
        shared = re.search(r"(\d+) bytes smem", block)
        if name and stack and used:
            frame, stores, loads = (int(x) for x in stack.groups())
            found[name[1]] = KernelResources(
                int(used[1]), frame, stores, loads, int(shared[1]) if shared else 0
            )
    return found


def _compile(
    name: str,
    arch: str,
    text: str,
    headers: tuple[tuple[str, str], ...],
    flags: tuple[str, ...],
    expressions: tuple[str, ...],
) -> CompiledModule:
    nvrtc = _nvrtc()
    started = time.perf_counter()
    program = _checked(
        nvrtc,
        "nvrtcCreateProgram",
        *nvrtc.nvrtcCreateProgram(
            text.encode(),
            name.encode(),
            len(headers),
            [body.encode() for _, body in headers],
            [header.encode() for header, _ in headers],
        ),
    )
    try:
        for expression in expressions:
            _checked(
                nvrtc, "nvrtcAddNameExpression", *nvrtc.nvrtcAddNameExpression(program, expression.encode())
            )
        options = [flag.encode() for flag in (*flags, *_include_flags())]
        (code,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        log = _text_of(nvrtc, "ProgramLog", program).decode(errors="replace").rstrip("\0 \n")
        if int(code) != 0:
            raise KernelCompileError(name, arch, _code_name(nvrtc, code), log)
        symbols = {}
        for expression in expressions:
            lowered = nvrtc.nvrtcGetLoweredName(program, expression.encode())
            symbols[expression] = _checked(nvrtc, "nvrtcGetLoweredName", *lowered).decode()
        cubin = _text_of(nvrtc, "CUBIN", program)
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    seconds = time.perf_counter() - started
    return CompiledModule(name, arch, cubin, symbols, parse_resources(log), log, seconds)


def _unpack(name: str, arch: str, meta: dict[str, Any], cubin: bytes) -> CompiledModule:
    log = str(meta["log"])
    return CompiledModule(name, arch, cubin, dict(meta["symbols"]), parse_resources(log), log, 0.0)


def _cache_key(
    text: str, headers: tuple[tuple[str, str], ...], flags: tuple[str, ...], expressions: tuple[str, ...]
) -> str:
    """Everything the machine code depends on."""
    digest = hashlib.sha256()
    for part in (
        text,
        *(x for pair in headers for x in pair),
        "|",
        *flags,
        "|",
        *expressions,
        str(nvrtc_version()),
    ):
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.hexdigest()


def _headers(directory: Path) -> tuple[tuple[str, str], ...]:
    return tuple((path.name, path.read_text()) for path in sorted(directory.glob("*.cuh")))


@lru_cache(maxsize=1)
def _include_flags() -> tuple[str, ...]:
    """Where cuda_fp16.h and its like lie: the nvidia-cuda-runtime wheel, else an installed toolkit."""
    nvidia = importlib.util.find_spec("nvidia")
    for package in (nvidia.submodule_search_locations or ()) if nvidia is not None else ():
        for header in sorted(Path(package).glob("*/include/cuda_fp16.h"), reverse=True):  # cu13 before cu12
            return (f"--include-path={header.parent}",)
    try:
        from cuda.pathfinder import find_nvidia_header_directory

        directory = find_nvidia_header_directory("cudart")
    except (ImportError, RuntimeError):  # a pathfinder that does not know headers
        directory = None
    return (f"--include-path={directory or '/usr/local/cuda/include'}",)


@lru_cache(maxsize=1)
def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()  # loads the library
    except (ImportError, RuntimeError) as error:
        raise DeviceNotFoundError(f"NVRTC is not installed (pip install 'ggufd[cuda]'): {error}") from error
    return nvrtc


def _text_of(nvrtc: Any, what: str, program: Any) -> bytes:
    """One of NVRTC's outputs (nvrtcGetCUBIN, nvrtcGetProgramLog): ask for its size, then fill a buffer."""
    size = _checked(nvrtc, f"nvrtcGet{what}Size", *getattr(nvrtc, f"nvrtcGet{what}Size")(program))
    text = b" " * int(size)
    _checked(nvrtc, f"nvrtcGet{what}", *getattr(nvrtc, f"nvrtcGet{what}")(program, text))
    return text


def _checked(nvrtc: Any, call: str, code: Any, *values: Any) -> Any:
    if int(code) != 0:
        raise KernelCompileError(call, "-", _code_name(nvrtc, code), "")
    return values[-1] if values else None


def _code_name(nvrtc: Any, code: Any) -> str:
    _, name = nvrtc.nvrtcGetErrorString(code)
    return str(name.decode())
