"""The encoder in a process of its own: big vocabularies are built, long prompts encoded beside the loop."""

import os
import sys
import threading
from array import array
from collections.abc import Iterable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection

from streamer.errors import GgufdError
from streamer.text.encoder import Encoder, EncoderSpec, Segment
from streamer.text.worker import Worker

_SHORT, _LONG = 0, 1
_SHORT_CHARS = 1 << 15  # about 10 ms; longer texts have a channel of their own and never hold up short ones

_BLOCK_NBYTES = 1 << 20  # of ids a message; its length is a multiple of 4, those of the marks below are not
_END, _FAILED = b"end", b"failed:"


class EncoderProcess:
    """`Encoder`'s face over a process, started again if it dies. Thread-safe; calls wait their turn."""

    def __init__(self, spec: EncoderSpec) -> None:
        """Blocks until the encoder is built. Raises ValueError with the library's reason if it cannot be."""
        self._payload = payload(spec.blocks())
        self._locks = (threading.Lock(), threading.Lock())
        self._starting = threading.Lock()
        try:
            self._worker = self._start()
        except BaseException:
            os.close(self._payload)
            raise

    def __del__(self) -> None:
        if hasattr(self, "_worker"):
            self.close()

    def close(self) -> None:
        self._worker.close()
        if self._payload >= 0:
            os.close(self._payload)
            self._payload = -1

    def encode(self, segments: Sequence[Segment]) -> "array[int]":
        channel = _LONG if sum(len(text) for text, _ in segments) > _SHORT_CHARS else _SHORT
        with self._locks[channel]:
            worker = self._worker
            try:
                return self._ask(worker, channel, segments)
            except (EOFError, OSError):
                self._restart(worker)
                try:
                    return self._ask(self._worker, channel, segments)
                except (EOFError, OSError) as error:
                    raise GgufdError("the tokenizer's process died twice over one text") from error

    def _ask(self, worker: Worker, channel: int, segments: Sequence[Segment]) -> "array[int]":
        connection = worker.channels[channel]
        connection.send(list(segments))
        ids = array("I")
        while (block := connection.recv_bytes()) != _END:
            if block.startswith(_FAILED):
                raise GgufdError(f"the tokenizer failed: {block[len(_FAILED) :].decode()}")
            ids.frombytes(block)
        return ids

    def _restart(self, dead: Worker) -> None:
        with self._starting:
            if self._worker is dead:
                if self._payload < 0:
                    raise GgufdError("the tokenizer is closed")
                dead.kill()
                self._worker = self._start()

    def _start(self) -> Worker:
        worker = Worker("streamer.text.encoder_process", n_channels=2, payload=self._payload)
        try:
            reason = worker.channels[_SHORT].recv_bytes()
        except (EOFError, OSError):
            reason = b"its process died while building"
        if reason:
            worker.kill()
            raise ValueError(reason.decode())
        return worker


def payload(blocks: Iterable[bytes]) -> int:
    """A descriptor of memory that holds `blocks`, to be inherited by a worker; the caller closes it."""
    fd = os.memfd_create("ggufd-vocabulary")
    with open(fd, "wb", closefd=False) as file:
        file.writelines(blocks)
    return fd


def read_payload(fd: int) -> EncoderSpec:
    with open(f"/proc/self/fd/{fd}", "rb") as file:  # an offset of its own
        return EncoderSpec.load(file)


def main(payload_fd: int, fds: Sequence[int]) -> None:
    """The process itself: builds, says so, then answers each channel from a thread until it closes."""
    channels = [Connection(fd) for fd in fds]
    try:
        encoder = Encoder(read_payload(payload_fd))
    except Exception as error:  # noqa: BLE001 - the library's errors have no common type
        channels[_SHORT].send_bytes((str(error) or type(error).__name__).encode())
        return
    channels[_SHORT].send_bytes(b"")
    threads = [threading.Thread(target=_answer, args=(encoder, c)) for c in channels]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _answer(encoder: Encoder, channel: Connection) -> None:
    sys.setswitchinterval(0.001)
    with suppress(EOFError, OSError):  # the owner is gone
        while True:
            segments = channel.recv()
            try:
                ids = memoryview(encoder.encode(segments)).cast("B")
            except Exception as error:  # noqa: BLE001 - told to the owner, who raises it
                channel.send_bytes(_FAILED + (str(error) or type(error).__name__).encode())
                continue
            for start in range(0, len(ids), _BLOCK_NBYTES):
                channel.send_bytes(ids[start : start + _BLOCK_NBYTES])
            channel.send_bytes(_END)
