"""What the kernel laboratory measures with: weights of real shapes, graphs of launches, the read roofline."""

import ctypes
import statistics
import time
from collections.abc import Callable
from typing import Any

from streamer.device.cuda import CudaDevice
from streamer.gguf.quants import QuantType
from streamer.kernels.compile import compile_source
from streamer.kernels.cublas import ProductShape
from streamer.kernels.cuda_array import DeviceArray
from streamer.kernels.cuda_matmul import CudaMatmul, ResidentWeight
from streamer.kernels.launch import Kernel, KernelStore
from streamer.kernels.matmul_arguments import FLOATS, QuantizedRows, RowsParams
from streamer.kernels.ops import Linear, Norm, Weight
from streamer.plan.layouts import plane_offsets, resident_nbytes
from streamer.plan.plan import Layout

LAB_SOURCE = """
extern "C" __global__ void __launch_bounds__(512) read_all(const uint4 *x, size_t n, unsigned *out) {
    unsigned sum = 0;
    const size_t step = (size_t)gridDim.x * blockDim.x;
    size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    for (; i + 3 * step < n; i += 4 * step) {
        uint4 v[4];
#pragma unroll
        for (int j = 0; j < 4; j++)
            asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                         : "=r"(v[j].x), "=r"(v[j].y), "=r"(v[j].z), "=r"(v[j].w) : "l"(x + i + j * step));
#pragma unroll
        for (int j = 0; j < 4; j++) sum ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
    }
    if (sum == 0x12345678u) *out = sum;
}
extern "C" __global__ void fill_random(unsigned *x, size_t n, unsigned seed, unsigned keep, unsigned set) {
    const size_t step = (size_t)gridDim.x * blockDim.x;
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += step) {
        unsigned h = (unsigned)i * 2654435761u + seed;
        h ^= h >> 16, h *= 0x85ebca6bu, h ^= h >> 13, h *= 0xc2b2ae35u, h ^= h >> 16;
        x[i] = (h & keep) | set;
    }
}
extern "C" __global__ void fill_normal(float *x, size_t n, unsigned seed, float scale) {
    const size_t step = (size_t)gridDim.x * blockDim.x;
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += step) {
        float sum = 0;
        for (int j = 0; j < 4; j++) {
            unsigned h = ((unsigned)i * 4 + j) * 2654435761u + seed;
            h ^= h >> 16, h *= 0x85ebca6bu, h ^= h >> 13, h *= 0xc2b2ae35u, h ^= h >> 16;
            sum += h * (1.f / 4294967296.f) - .5f;
        }
        x[i] = sum * 1.732f * scale;
    }
}
"""

# Bits kept and set so that random words are floats of either sign near 0.01.
_FLOAT_BITS = {
    QuantType.F32: (0x807FFFFF, 0x3C000000),
    QuantType.BF16: (0x807F807F, 0x3C003C00),
    QuantType.F16: (0x83FF83FF, 0x20002000),
}


class Report:
    """Rows printed as they come, kept for the record."""

    def __init__(self, roofline: float) -> None:
        self.roofline = roofline
        self.runs: list[dict[str, Any]] = []

    def note(self, line: str) -> None:
        self.runs.append({"what": line})
        print(line, flush=True)

    def add(self, what: str, seconds: float, nbytes: float = 0.0, **more: float) -> None:
        share = nbytes / seconds / self.roofline
        run = {"what": what, "ms": round(1e3 * seconds, 4), "share": round(share, 3)}
        run |= {k: float(f"{v:.4g}") for k, v in more.items()}
        self.runs.append(run)
        extra = "  ".join(f"{k} {v:g}" for k, v in run.items() if k not in ("what", "ms", "share"))
        print(f"{what:<66} {run['ms']:>9.4f} ms  share {share:5.3f}  {extra}", flush=True)


class Lab:
    """One device with weights made of random bits, and medians of graph replays."""

    def __init__(self, device: CudaDevice, store: KernelStore, arch: str) -> None:
        self.device, self.store = device, store
        self.stream = device.create_stream("lab")
        module = compile_source("lab.cu", arch=arch, source=LAB_SOURCE)
        loaded = device.load_module(module.cubin)

        def kernel(name: str, *types: type) -> Kernel:
            return Kernel(device, device.function(loaded, name), types, name=name)

        pointer, size, word = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_uint32
        self._read = kernel("read_all", pointer, size, pointer)
        self._random = kernel("fill_random", pointer, size, word, word, word)
        self._normal = kernel("fill_normal", pointer, size, word, ctypes.c_float)
        self.matmul = CudaMatmul(device, store)
        self._start, self._stop = (device.driver.call("cuEventCreate", 0) for _ in range(2))
        self._seed = 0
        self._count = 0
        self.buffers: list[Any] = []

    @property
    def handle(self) -> int:
        return self.stream.handle

    def sync(self) -> None:
        self.device.activate()
        self.stream.sync()

    def free(self) -> None:
        self.sync()
        while self.buffers:
            self.buffers.pop().close()

    # ---- data --------------------------------------------------------------------------------------

    def bytes(self, nbytes: int) -> int:
        buffer = self.device.allocate(nbytes + 256)
        self.buffers.append(buffer)
        return int(buffer.handle)

    def random(self, address: int, nbytes: int, keep: int = 0xFFFFFFFF, set: int = 0) -> None:
        """32-bit words of random bits, of which `keep` are kept and `set` are set."""
        self._seed += 1
        arguments = address, nbytes // 4, self._seed, keep, set
        self._random((1056, 1, 1), 256, *arguments, stream=self.handle, dependent=False)

    def normal(self, n_rows: int, n_columns: int, scale: float = 1.0) -> DeviceArray:
        """f32 rows of about normal numbers."""
        address = self.bytes(4 * n_rows * n_columns)
        self._seed += 1
        n = n_rows * n_columns
        self._normal((256, 1, 1), 256, address, n, self._seed, scale, stream=self.handle, dependent=False)
        return DeviceArray(address, n_rows, n_columns)

    def weight(self, type: QuantType, n_in: int, n_out: int) -> Weight:
        """Random quants with scales of 0.008 or so; floats near 0.01."""
        n = n_in * n_out
        layout = Layout.FILE if type in FLOATS else Layout.PLANES
        nbytes = resident_nbytes(layout, type, n)
        address = self.bytes(nbytes)
        if type in FLOATS:
            self.random(address, nbytes, *_FLOAT_BITS[type])
        else:
            scales = plane_offsets(type, n)[1]
            self.random(address, scales)
            self.device.driver.call(
                "cuMemsetD8Async", address + scales, 0x20, nbytes - scales, self.stream.raw
            )
        self._count += 1
        return Weight(f"w{self._count}", type, (n_in, n_out), ResidentWeight(address, layout))

    def linear(self, type: QuantType, n_in: int, n_out: int) -> Linear:
        return Linear(self.weight(type, n_in, n_out))

    def norm(self, n: int) -> Norm:
        ones = self.normal(1, n)
        return Norm(Weight("norm", QuantType.F32, (n,), ResidentWeight(ones.address, Layout.FILE)), 1e-5)

    def quantized(self, n_tokens: int, n_in: int, activation_bytes: int) -> QuantizedRows:
        """Quantized activations, from real ones."""
        x = self.normal(n_tokens, n_in)
        to = QuantizedRows(
            self.bytes(n_tokens * n_in),
            self.bytes(n_tokens * n_in) if activation_bytes == 2 else 0,
            self.bytes(n_tokens * n_in // 8),
            self.bytes(n_tokens * n_in // 4),
        )
        params = RowsParams(x=x.address, x_stride=n_in, K=n_in, n_tokens=n_tokens)
        params.to = to.argument
        self.matmul.launcher.rows(params, stream=self.handle)
        return to

    def bf16(self, n_tokens: int, n_in: int) -> DeviceArray:
        x, address = self.normal(n_tokens, n_in), self.bytes(2 * n_tokens * n_in)
        params = RowsParams(x=x.address, x_stride=n_in, K=n_in, n_tokens=n_tokens, out_bf16=address)
        self.matmul.launcher.rows(params, stream=self.handle)
        return DeviceArray(address, n_tokens, n_in, "bf16")

    # ---- time --------------------------------------------------------------------------------------

    def seconds(self, launch: Callable[[], None], *, repeats: int = 7) -> float:
        """Median seconds of what `launch` queues, by events."""
        call, raw = self.device.driver.call, self.stream.raw
        self.device.activate()
        launch()
        launch()
        self.stream.sync()
        times = []
        for _ in range(repeats):
            call("cuEventRecord", self._start, raw)
            launch()
            call("cuEventRecord", self._stop, raw)
            call("cuEventSynchronize", self._stop)
            times.append(1e-3 * float(call("cuEventElapsedTime", self._start, self._stop)))
        return statistics.median(times)

    def graph_seconds(self, launch: Callable[[], None], *, replays: int = 5) -> tuple[float, float]:
        """(seconds of one replay of the captured launches, host seconds of launching them eagerly)."""
        call, raw = self.device.driver.call, self.stream.raw
        self.device.activate()
        launch()  # compiles, loads code
        self.stream.sync()
        began = time.perf_counter()
        launch()
        eager = time.perf_counter() - began
        self.stream.sync()
        api = self.device.driver.api
        call("cuStreamBeginCapture", raw, api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
        launch()
        graph = call("cuStreamEndCapture", raw)
        executable = call("cuGraphInstantiate", graph, 0)

        def replay() -> None:
            for _ in range(replays):
                call("cuGraphLaunch", executable, raw)

        seconds = self.seconds(replay) / replays
        call("cuGraphExecDestroy", executable)
        call("cuGraphDestroy", graph)
        return seconds, eager

    def read_roofline(self, nbytes: int = 8 << 30) -> float:
        """Bytes a second of 16-byte streaming loads."""
        address = self.bytes(nbytes)
        self.random(address, nbytes)
        sink = self.bytes(16)

        def launch() -> None:
            self._read((132 * 8, 1, 1), 512, address, nbytes // 16, sink, stream=self.handle, dependent=False)

        seconds = self.seconds(launch)
        self.free()
        return nbytes / seconds

    def bf16_roofline(self, n: int = 8192) -> float:
        """Operations a second of an n x n x n bf16 product by cuBLASLt on random data."""
        x, w = self.bf16(n, n), self.bf16(n, n)
        out = self.bytes(2 * n * n)
        shape = ProductShape(n, n, n, n, "bf16")
        blas = self.matmul.blas()
        seconds = self.seconds(lambda: blas.multiply(shape, x.address, w.address, out, stream=self.handle))
        self.free()
        return 2.0 * n**3 / seconds

    def close(self) -> None:
        self.free()
        self.matmul.close()
