"""Which device a name opens."""

import pytest

from streamer.device import cuda, cuda_driver
from streamer.device.ahead import wake_driver
from streamer.device.open import open_device
from streamer.errors import DeviceNotFoundError


def no_code(capability: tuple[int, int]) -> bytes:
    raise AssertionError("the host needs no machine code")


@pytest.fixture
def no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_driver() -> None:
        raise DeviceNotFoundError("no NVIDIA driver: libcuda.so.1 is not there")

    monkeypatch.setattr(cuda, "load_driver", load_driver)
    monkeypatch.setattr(cuda_driver, "load_driver", load_driver)


@pytest.mark.usefixtures("no_driver")
def test_auto_falls_back_to_the_host_and_says_why() -> None:
    device, note = open_device("auto", checksum_code=no_code)
    assert device.capabilities.kind == "host"
    assert note == "no CUDA device (no NVIDIA driver: libcuda.so.1 is not there): using the host device"
    device.close()


@pytest.mark.usefixtures("no_driver")
@pytest.mark.parametrize("name", ["cuda", "cuda:1"])
def test_cuda_asked_for_and_absent_is_not_found(name: str) -> None:
    with pytest.raises(DeviceNotFoundError, match="libcuda") as caught:
        open_device(name, checksum_code=no_code)
    assert caught.value.exit_code == 69


def test_host_opens_without_a_word() -> None:
    device, note = open_device("host", checksum_code=no_code)
    assert (device.capabilities.kind, note) == ("host", None)
    device.close()


def test_unknown_name_is_refused() -> None:
    with pytest.raises(DeviceNotFoundError, match="'rocm' names no device"):
        open_device("rocm", checksum_code=no_code)


@pytest.mark.usefixtures("no_driver")
def test_driver_is_woken_only_where_it_may_be_needed() -> None:
    assert wake_driver("host") is None
    thread = wake_driver("auto")
    assert thread is not None
    thread.join(timeout=10)
    assert not thread.is_alive()
