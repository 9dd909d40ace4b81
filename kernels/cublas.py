"""cuBLASLt's matrix product over raw addresses: y = x W^T for bf16 x and W, f32 accumulation.

The library comes from the nvidia-cublas wheel (or a toolkit) and is called through ctypes: a dozen
functions of a stable C interface. A product's algorithm is chosen once a shape and kept.
"""

import ctypes
from collections import OrderedDict
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from streamer.errors import DeviceError, DeviceNotFoundError

WORKSPACE_NBYTES = 32 << 20  # what NVIDIA recommends for Hopper
MAX_PRODUCTS = 1024  # shapes whose algorithms are kept

# library_types.h, cublas_api.h, cublasLt.h
_R_32F, _R_16BF = 0, 14
_COMPUTE_32F = 68
_OP_T = 1
_DESC_TRANSA, _DESC_EPILOGUE, _DESC_BIAS_POINTER, _DESC_BIAS_DATA_TYPE = 3, 7, 8, 26
_EPILOGUE_BIAS = 4
_PREFERENCE_MAX_WORKSPACE = 1
_TYPES = {"f32": _R_32F, "bf16": _R_16BF}


class _Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t; its first member is the algorithm."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace_nbytes", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@dataclass(frozen=True)
class ProductShape:
    """y (n_tokens, out_stride) = x (n_tokens, n_in) W (n_out, n_in)^T, in row-major words."""

    n_tokens: int
    n_in: int
    n_out: int
    out_stride: int
    out_dtype: str  # "f32" | "bf16"
    has_bias: bool = False


class _Product:
    """Descriptors and the algorithm of one shape."""

    def __init__(self, blas: "CublasLt", shape: ProductShape) -> None:
        # column-major words: y^T (n_out, n_tokens) = (W^T)^T x^T
        out_type = _TYPES[shape.out_dtype]
        self.description = blas.create("MatmulDesc", _COMPUTE_32F, _R_32F)
        blas.set_attribute("MatmulDesc", self.description, _DESC_TRANSA, ctypes.c_int32(_OP_T))
        if shape.has_bias:
            blas.set_attribute("MatmulDesc", self.description, _DESC_EPILOGUE, ctypes.c_int32(_EPILOGUE_BIAS))
            blas.set_attribute("MatmulDesc", self.description, _DESC_BIAS_DATA_TYPE, ctypes.c_int32(_R_32F))
        layout = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64)
        sizes = {
            "w": (_R_16BF, shape.n_in, shape.n_out, shape.n_in),
            "x": (_R_16BF, shape.n_in, shape.n_tokens, shape.n_in),
            "y": (out_type, shape.n_out, shape.n_tokens, shape.out_stride),
        }
        self.layouts = {
            name: blas.create("MatrixLayout", kind, *(t(v) for t, v in zip(layout, rest, strict=True)))
            for name, (kind, *rest) in sizes.items()
        }
        self.algorithm = blas.choose(self, shape)


class CublasLt:
    """One handle and the products it has met. Owns nothing on the device; used by one thread."""

    def __init__(self, *, workspace: int, workspace_nbytes: int = WORKSPACE_NBYTES) -> None:
        """`workspace`: device address of the library's scratch, 256-byte aligned; one stream only."""
        self._library = _library()
        self._workspace, self._workspace_nbytes = workspace, workspace_nbytes
        self._products: OrderedDict[ProductShape, _Product] = OrderedDict()
        self._one, self._zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
        self._handle = ctypes.c_void_p()
        self._call("cublasLtCreate", ctypes.byref(self._handle))
        self._preference = self.create("MatmulPreference")
        size = ctypes.c_size_t(workspace_nbytes)
        self.set_attribute("MatmulPreference", self._preference, _PREFERENCE_MAX_WORKSPACE, size)

    def multiply(
        self,
        shape: ProductShape,
        x: int,
        weight: int,
        out: int,
        *,
        stream: int,
        bias: int = 0,
        residual: int = 0,
    ) -> None:
        """y = x W^T + bias (n_out, f32) + residual (laid out as y); all by address, 16-byte aligned."""
        product = self._product(shape)
        if shape.has_bias:
            self.set_attribute("MatmulDesc", product.description, _DESC_BIAS_POINTER, ctypes.c_void_p(bias))
        layouts, pointer = product.layouts, ctypes.c_void_p
        self._call(
            "cublasLtMatmul",
            self._handle,
            product.description,
            ctypes.byref(self._one),
            pointer(weight),
            layouts["w"],
            pointer(x),
            layouts["x"],
            ctypes.byref(self._one if residual else self._zero),
            pointer(residual or out),
            layouts["y"],
            pointer(out),
            layouts["y"],
            ctypes.byref(product.algorithm),
            pointer(self._workspace),
            ctypes.c_size_t(self._workspace_nbytes),
            pointer(stream),
        )

    def choose(self, product: _Product, shape: ProductShape) -> Any:
        """The library's first choice of algorithm."""
        result, found = _Heuristic(), ctypes.c_int()
        layouts = product.layouts
        self._call(
            "cublasLtMatmulAlgoGetHeuristic",
            self._handle,
            product.description,
            layouts["w"],
            layouts["x"],
            layouts["y"],
            layouts["y"],
            self._preference,
            ctypes.c_int(1),
            ctypes.byref(result),
            ctypes.byref(found),
        )
        if found.value < 1 or result.state != 0:
            raise DeviceError(
                "cublasLtMatmulAlgoGetHeuristic", str(result.state), f"no algorithm for {shape}"
            )
        return result.algorithm

    def create(self, kind: str, *arguments: Any) -> ctypes.c_void_p:
        descriptor = ctypes.c_void_p()
        self._call(f"cublasLt{kind}Create", ctypes.byref(descriptor), *arguments)
        return descriptor

    def set_attribute(self, kind: str, descriptor: ctypes.c_void_p, attribute: int, value: Any) -> None:
        size = ctypes.c_size_t(ctypes.sizeof(value))
        self._call(f"cublasLt{kind}SetAttribute", descriptor, attribute, ctypes.byref(value), size)

    def close(self) -> None:
        while self._products:
            self._destroy(self._products.popitem()[1])
        if self._handle:
            self._call("cublasLtMatmulPreferenceDestroy", self._preference)
            self._call("cublasLtDestroy", self._handle)
            self._handle = ctypes.c_void_p()

    def _product(self, shape: ProductShape) -> _Product:
        product = self._products.get(shape)
        if product is None:
            if len(self._products) >= MAX_PRODUCTS:
                self._destroy(self._products.popitem(last=False)[1])
            product = self._products[shape] = _Product(self, shape)
        return product

    def _destroy(self, product: _Product) -> None:
        for layout in product.layouts.values():
            self._call("cublasLtMatrixLayoutDestroy", layout)
        self._call("cublasLtMatmulDescDestroy", product.description)

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status != 0:
            text = self._library.cublasLtGetStatusString(status)
            raise DeviceError(name, str(status), text.decode() if text else "unknown status")


@lru_cache(maxsize=1)
def _library() -> Any:
    from cuda.pathfinder import load_nvidia_dynamic_lib

    try:
        path = load_nvidia_dynamic_lib("cublasLt").abs_path
    except RuntimeError as error:
        raise DeviceNotFoundError(
            f"cuBLASLt is not installed (pip install 'ggufd[cuda]'): {error}"
        ) from error
    library = ctypes.CDLL(path)
    library.cublasLtGetStatusString.restype = ctypes.c_char_p
    return library
