"""Wakes the NVIDIA driver while the rest of the process still imports.

cuInit takes 0.23 s and the primary context 0.14 s, mostly waiting.
"""

import threading

from streamer.errors import DeviceError, DeviceNotFoundError


def wake_driver(asked: str) -> threading.Thread | None:
    """Initialise the driver in a thread when `asked` ("auto", "cuda", "cuda:N") may need it; None when not.

    The context is retained once more than the device does: it stays until the process ends, for which a
    daemon needs it. Nothing is reported: whoever opens the device meets the same answer again, at once.
    """
    if asked == "host":
        return None
    ordinal = asked.partition(":")[2]
    number = int(ordinal) if ordinal.isdigit() else 0
    thread = threading.Thread(target=_initialise, args=(number,), name="cuInit", daemon=True)
    thread.start()
    return thread


def _initialise(ordinal: int) -> None:
    from streamer.device.cuda_driver import find_device, load_driver

    try:
        driver = load_driver()
        driver.call("cuDevicePrimaryCtxRetain", find_device(driver, ordinal))
    except (DeviceNotFoundError, DeviceError):
        return  # told by open_device, which asks again
