"""NVRTC without a GPU: every kernel for every architecture without warnings or spills; the cache."""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from streamer.config import cache_directory
from streamer.errors import DeviceNotFoundError
from streamer.gguf.quants import QuantType
from streamer.kernels.compile import (
    KERNEL_DIRECTORY,
    CompiledModule,
    KernelCompileError,
    KernelResources,
    choose_architecture,
    compile_source,
    declared_instances,
    parse_resources,
    supported_architectures,
)
from streamer.kernels.compile_cache import MAX_ENTRIES, CompileCache, decode, encode
from streamer.kernels.matmul_launch import ROWS_MODULE, product_modules
from streamer.kernels.matmul_ring import RINGS, RingVariant

WHOLE = ("sm_80", "sm_90a", "sm_120")  # oldest, Hopper's own instructions, newest: to machine code
FRONT_END = ("sm_86", "sm_89", "sm_100")  # their relatives: parsed and checked, in a hundredth of the time
SMALL = """
template <int N> __global__ void fill(float* x) { x[threadIdx.x] = N + OFFSET; }
extern "C" __global__ void plain(float* x) { x[threadIdx.x] = 1; }
"""


def small(cache: Path | None = None, *, offset: int = 1) -> CompiledModule:
    return compile_source(
        "small.cu",
        arch="sm_90a",
        source=SMALL,
        defines={"OFFSET": offset},
        name_expressions=("fill<3>",),
        cache_directory=cache,
    )


# Sources whose instances follow a weight's type: the types and architectures that are compiled here.
PRODUCTS = (
    (QuantType.Q8_0, "sm_80"),
    (QuantType.Q8_0, "sm_90a"),
    (QuantType.Q8_0, "sm_120"),
    (QuantType.Q4_K, "sm_90a"),
    (QuantType.Q6_K, "sm_90a"),
)
BY_TYPE = frozenset(
    {"gemv.cu", "gemv_ring.cu", "mma_direct.cu", "mma_tiled.cu", "dequantize.cu", "quantize.cu"}
)
KERNELS = pytest.mark.parametrize(
    "path",
    [path for path in sorted(KERNEL_DIRECTORY.glob("*.cu")) if path.name not in BY_TYPE],
    ids=lambda path: path.name,
)


def compiled(source: str | Path, arch: str, instances: tuple[str, ...]) -> CompiledModule:
    cache = cache_directory() / "kernels"
    return compile_source(source, arch=arch, name_expressions=instances, cache_directory=cache)


def assert_sound(module: CompiledModule) -> None:
    assert not module.warnings, (module.name, module.arch)
    assert not module.spilling, (module.name, module.arch)
    assert module.resources, f"{module.name}: no kernel in it: declare its `// instance:`s"


@KERNELS
def test_kernel_compiles_without_warning_or_spill(path: Path) -> None:
    instances = declared_instances(path.read_text())
    with ThreadPoolExecutor(2) as threads:
        for module in threads.map(lambda arch: compiled(path, arch, instances), WHOLE):
            assert_sound(module)


@pytest.mark.parametrize("path", sorted(KERNEL_DIRECTORY.glob("*.cu*")), ids=lambda path: path.name)
def test_inputs_of_kernels_that_start_early_are_not_promised_constant(path: Path) -> None:
    """Such a promise let the compiler read queries before they were written (common.cuh)."""
    source = path.read_text()
    promised = re.findall(r"const \w+ ?\*\s*__restrict__ ?\w+", source)
    assert "pdl_wait();" not in source or not promised


@pytest.mark.parametrize(("type", "arch"), PRODUCTS, ids=lambda value: getattr(value, "name", value))
def test_products_of_a_type_compile_without_warning_or_spill(type: QuantType, arch: str) -> None:
    rings = RINGS.get(type, (RingVariant(4),))
    specs = [*product_modules(type, gemv_tokens=8, activation_bytes=1, rings=rings), ROWS_MODULE]
    assert {spec.source for spec in specs} == BY_TYPE
    with ThreadPoolExecutor(2) as threads:
        for module in threads.map(lambda spec: compiled(spec.source, arch, spec.instances), specs):
            assert_sound(module)


@KERNELS
@pytest.mark.parametrize("arch", FRONT_END)
def test_kernel_is_valid_for_further_architectures(path: Path, arch: str) -> None:
    instances = declared_instances(path.read_text())
    module = compile_source(path, arch=arch, name_expressions=instances, options=("-fdevice-syntax-only",))
    assert not module.warnings


def test_symbols_of_templates_are_known_and_c_names_stay() -> None:
    module = small()
    assert module.symbol("fill<3>") in module.resources
    assert module.symbol("plain") == "plain" in module.resources
    assert module.cubin.startswith(b"\x7fELF")
    assert module.resources["plain"].registers > 0


def test_error_carries_the_compilers_log() -> None:
    with pytest.raises(KernelCompileError, match='identifier "nothing" is undefined') as caught:
        compile_source("bad.cu", arch="sm_90a", source="__device__ int f() { return nothing; }")
    assert "bad.cu" in str(caught.value)


def test_warnings_are_kept_apart() -> None:
    source = 'extern "C" __global__ void k(float* x) { int unused; x[0] = 1; }'
    module = compile_source("warn.cu", arch="sm_90a", source=source)
    assert len(module.warnings) == 1
    assert "unused" in module.warnings[0]


def test_spilling_kernel_is_reported() -> None:
    source = """extern "C" __global__ void __launch_bounds__(1024, 2) k(float* x) {
        float a[96];
        #pragma unroll
        for (int i = 0; i < 96; i++) a[i] = x[i * 7 + threadIdx.x];
        __syncthreads();
        #pragma unroll
        for (int i = 0; i < 96; i++) x[i * 5 + threadIdx.x] = a[i] * a[95 - i];
    }"""
    assert "k" in compile_source("spill.cu", arch="sm_90a", source=source).spilling


def test_second_compilation_comes_from_the_cache(tmp_path: Path) -> None:
    first, second = small(tmp_path), small(tmp_path)
    assert first.seconds > 0 == second.seconds
    assert (second.cubin, second.symbols, second.resources) == (first.cubin, first.symbols, first.resources)


def test_defines_and_headers_are_part_of_the_key(tmp_path: Path) -> None:
    small(tmp_path, offset=1)
    assert small(tmp_path, offset=2).seconds > 0
    cache = tmp_path / "cache"
    (tmp_path / "k.cu").write_text('#include "v.cuh"\nextern "C" __global__ void k(int* x) { *x = V; }')
    for value in (1, 2):
        (tmp_path / "v.cuh").write_text(f"#define V {value}\n")
        assert compile_source(tmp_path / "k.cu", arch="sm_80", cache_directory=cache).seconds > 0


def test_damaged_entry_counts_as_absent(tmp_path: Path) -> None:
    good = small(tmp_path).cubin
    (entry,) = tmp_path.glob("*.kernel")
    content = bytearray(entry.read_bytes())
    for damaged in (b"", bytes(content[:-1]), bytes([*content[:-1], content[-1] ^ 1])):
        entry.write_bytes(damaged)
        module = small(tmp_path)
        assert module.seconds > 0
        assert module.cubin == good
    assert small(tmp_path).seconds == 0


def test_cache_that_cannot_be_written_costs_only_itself(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert small(tmp_path / "file" / "below").cubin


def test_writers_of_one_key_leave_a_whole_entry(tmp_path: Path) -> None:
    cache = CompileCache(tmp_path)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda i: cache.put("key", {"i": i}, bytes([i]) * 100_000), range(32)))
    found = cache.get("key")
    assert found is not None
    assert found[1] == bytes([found[0]["i"]]) * 100_000
    assert [path.name for path in tmp_path.iterdir()] == ["key.kernel"]


def test_number_of_entries_is_bounded(tmp_path: Path) -> None:
    for i in range(MAX_ENTRIES + 3):
        (tmp_path / f"{i}.kernel").write_bytes(b"")
    CompileCache(tmp_path).put("new", {}, b"code")
    assert len(list(tmp_path.iterdir())) == MAX_ENTRIES
    assert CompileCache(tmp_path).get("new") == ({}, b"code")


def test_encoding_is_undone_by_decoding() -> None:
    assert decode(encode({"a": ["b"]}, b"\0\1")) == ({"a": ["b"]}, b"\0\1")


@pytest.mark.parametrize(
    ("capability", "expected"),
    [((9, 0), "sm_90a"), ((8, 9), "sm_89"), ((8, 0), "sm_80"), ((12, 1), "sm_121a"), ((8, 8), "sm_87")],
)
def test_architecture_is_the_devices_own_or_the_nearest_older(
    capability: tuple[int, int], expected: str
) -> None:
    assert choose_architecture(capability, (75, 80, 86, 87, 89, 90, 100, 120, 121)) == expected


def test_unknown_architecture_is_refused() -> None:
    with pytest.raises(DeviceNotFoundError, match=r"compute 13\.0"):
        choose_architecture((13, 0), supported_architectures())


def test_report_of_several_kernels_is_taken_apart() -> None:
    log = """ptxas info    : Compiling entry function 'a' for 'sm_90a'
ptxas info    : Function properties for a
    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 8 bytes cumulative stack size, 49152 bytes smem
ptxas info    : Compiling entry function 'b' for 'sm_90a'
ptxas info    : Function properties for b
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 10 registers, used 0 barriers"""
    assert parse_resources(log) == {
        "a": KernelResources(255, 8, 4, 12, 49152),
        "b": KernelResources(10, 0, 0, 0, 0),
    }


def test_instances_are_read_from_comments() -> None:
    assert declared_instances("// instance: k<3, float>\nint x;  // instance:\n  // instance: m<1>\n") == (
        "k<3, float>",
        "m<1>",
    )
