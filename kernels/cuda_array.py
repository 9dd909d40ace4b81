"""What CUDA operators hand each other: an address with a shape; and the arena temporaries come from."""

from dataclasses import dataclass, field

ITEM_NBYTES = {"f32": 4, "bf16": 2, "f16": 2, "i8": 1, "i32": 4, "u32": 4}
ALIGNMENT = 256  # bytes: every array starts on one, so 16-byte vector loads are always aligned


@dataclass(frozen=True)
class DeviceArray:
    """A row-major matrix in device memory. Does not own it."""

    address: int
    rows: int
    columns: int
    dtype: str = "f32"  # a key of ITEM_NBYTES
    stride: int = 0  # elements between rows; 0: columns

    @property
    def row_stride(self) -> int:
        return self.stride or self.columns

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_stride * ITEM_NBYTES[self.dtype]

    def columns_from(self, start: int, count: int) -> "DeviceArray":
        """A view of `count` columns from `start`."""
        offset = start * ITEM_NBYTES[self.dtype]
        return DeviceArray(self.address + offset, self.rows, count, self.dtype, self.row_stride)


@dataclass
class Arena:
    """Bump allocation inside one planned workspace buffer; `reset` at the start of each sublayer.

    With `capacity` None sizes are only counted: a dry run gives `peak`, the bytes the plan needs.
    """

    base: int
    capacity: int | None
    used: int = 0
    peak: int = field(default=0)

    def take(self, rows: int, columns: int, dtype: str = "f32") -> DeviceArray:
        nbytes = rows * columns * ITEM_NBYTES[dtype]
        start = self.used
        self.used = start + (nbytes + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
        self.peak = max(self.peak, self.used)
        assert self.capacity is None or self.used <= self.capacity, (self.used, self.capacity)
        return DeviceArray(self.base + start, rows, columns, dtype)

    def reset(self) -> None:
        self.used = 0
