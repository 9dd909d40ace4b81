"""`ggufd` and `python -m streamer`. The service is imported only by the command that runs it."""

import sys

from streamer.config import Config


def _serve(config: Config) -> int:
    from streamer.service import serve

    return serve(config)


def main() -> None:
    from streamer.cli import run

    sys.exit(run(_serve))


if __name__ == "__main__":
    main()
