"""A worker whose owner leaves ends quietly, whatever it is doing."""

import subprocess
import sys

import pytest

LEAVE = """
import sys, time
from streamer.text.encoder import EncoderSpec
from streamer.text.encoder_process import payload
from streamer.text.worker import Worker
spec = EncoderSpec("bpe", "gpt-2", ["a"], bytes([1]), b"", [], False, -1)
worker = Worker("streamer.text." + sys.argv[1], n_channels=2, payload=payload(spec.blocks()))
for channel in worker.channels:
    channel.close()
while worker.is_alive:
    time.sleep(0.01)
"""


@pytest.mark.parametrize("module", ["encoder_process", "template_worker", "constraint_worker"])
def test_an_owner_that_leaves_at_the_start_is_no_error(module: str) -> None:
    """A daemon stopped in the middle of a load: its log once ended with the tokenizer's BrokenPipeError."""
    left = subprocess.run(
        [sys.executable, "-c", LEAVE, module], capture_output=True, text=True, timeout=60, check=True
    )
    assert left.stderr == ""
