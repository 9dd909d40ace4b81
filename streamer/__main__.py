"""`ggufd` and `python -m streamer`. The service is imported only by the command that runs it."""

import sys

from streamer.config import Config


def _serve(config: Config) -> int:
    from streamer.device.ahead import wake_driver

    wake_driver(config.device)  # while the imports below take their time
    from streamer.service import serve

    return serve(config)


def main() -> None:
    from streamer.cli import run

    sys.exit(run(_serve))


if __name__ == "__main__":
    main()
