"""Wakes the NVIDIA driver while the rest of the process still imports: cuInit takes 0.2 s, mostly waiting."""

import threading

from streamer.errors import DeviceNotFoundError


def wake_driver(asked: str) -> threading.Thread | None:
    """Initialise the driver in a thread when `asked` ("auto", "cuda", "cuda:N") may need it; None when not.

    Nothing is kept and nothing is reported: whoever opens the device meets the same answer again, at once.
    """
    if asked == "host":
        return None
    thread = threading.Thread(target=_initialise, name="cuInit", daemon=True)
    thread.start()
    return thread


def _initialise() -> None:
    from streamer.device.cuda_driver import load_driver

    try:
        load_driver()
    except DeviceNotFoundError:
        return  # told by open_device, which asks again
