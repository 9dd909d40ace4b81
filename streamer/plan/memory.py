"""What must be held beside the weights, and how it is said to a person. Pure."""

from dataclasses import dataclass

from streamer.errors import ConfigError
from streamer.plan.plan import MemorySum

DEFAULT_CONTEXT = 8192  # tokens, where the training context allows and nothing else was asked


@dataclass(frozen=True)
class CacheNeeds:
    """What a model's cache takes, from its cache layout and the cache's element type."""

    kv_nbytes_per_token: int
    state_nbytes_per_sequence: int
    page_size: int  # tokens
    training_context: int  # tokens


@dataclass(frozen=True)
class PlanOptions:
    """What was asked for, and what the executor says it needs."""

    n_ctx: int | None = None  # tokens a sequence; None: min(training context, 8192)
    max_sequences: int = 8
    state_snapshots: int = 0  # further copies of recurrent state, for prefix reuse
    chunk_nbytes: int = 4 << 20  # a slot of the ring
    workspace_nbytes: int = 0  # activations and scratch
    landing_nbytes: int | None = None  # None: the largest weight whose layout is not the file's
    reserve_nbytes: int = 0  # left free for the driver


@dataclass(frozen=True)
class CacheSize:
    n_ctx: int
    pages_per_sequence: int
    page_nbytes: int
    state_nbytes: int  # all sequence slots and snapshots


def size_cache(needs: CacheNeeds, options: PlanOptions, path: str) -> CacheSize:
    """Context, pages and state. ConfigError for numbers that cannot work."""
    for name, value in (("--ctx", options.n_ctx), ("--max-sequences", options.max_sequences)):
        if value is not None and value < 1:
            raise ConfigError(f"{name}: must be at least 1, is {value}")
    n_ctx = min(options.n_ctx or DEFAULT_CONTEXT, needs.training_context)
    slots = options.max_sequences + (options.state_snapshots if needs.state_nbytes_per_sequence else 0)
    return CacheSize(
        n_ctx=n_ctx,
        pages_per_sequence=-(-n_ctx // needs.page_size),
        page_nbytes=needs.page_size * needs.kv_nbytes_per_token,
        state_nbytes=slots * needs.state_nbytes_per_sequence,
    )


def describe_lack(least: MemorySum, size: CacheSize, options: PlanOptions, free_bytes: int) -> str:
    """One line: the sum of what is needed at least, what is free, and what to change if that can help."""
    parts = [
        f"weights {readable_nbytes(least.weights)}",
        f"KV cache {readable_nbytes(least.kv_cache)} (one context of {size.n_ctx} tokens)",
        f"recurrent state {readable_nbytes(least.recurrent_state)} ({options.max_sequences} sequences)",
        f"workspace {readable_nbytes(least.workspace)}",
        f"reserve {readable_nbytes(least.reserve)}",
    ]
    amounts = (least.weights, least.kv_cache, least.recurrent_state, least.workspace, least.reserve)
    text = " + ".join(part for part, amount in zip(parts, amounts, strict=True) if amount)
    lacking = readable_nbytes(least.total - free_bytes)
    total, free = readable_nbytes(least.total), readable_nbytes(free_bytes)
    text = f"does not fit: {text} = {total}, free {free}, lacking {lacking}"
    room = free_bytes - (least.total - least.kv_cache)
    pages = room // size.page_nbytes if size.page_nbytes else 0
    if 0 < pages < size.pages_per_sequence:
        text += f"; --ctx {pages * size.n_ctx // size.pages_per_sequence} would fit"
    return text


def readable_nbytes(nbytes: int) -> str:
    """Decimal units, three digits: `37.8 GB`, `512 B`."""
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if abs(nbytes) >= scale:
            value = nbytes / scale
            digits = 2 if value < 10 else 1 if value < 100 else 0
            return f"{value:.{digits}f} {unit}"
    return f"{nbytes} B"
