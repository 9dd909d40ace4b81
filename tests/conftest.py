"""What every room's tests may use: the two real models, pulled once for all workers."""

from pathlib import Path

import pytest

from streamer.pull import pull


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct Q4_1 (98 MB); `pull` holds a file lock, so that xdist's workers fetch it once."""
    return pull("smollm2-135m")


@pytest.fixture(scope="session")
def gemma_path() -> Path:
    """Gemma-3 270M Q4_K_M (253 MB)."""
    return pull("gemma-3-270m")
