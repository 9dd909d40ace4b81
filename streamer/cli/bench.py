"""`ggufd bench`: hands over to the benchmarks."""

import importlib
from collections.abc import Callable

import click

KINDS = {
    "load": "The load against what the link, the disk and a plain copy can do.",
    "decode": "Tokens a second of a model, prompts and answers.",
    "serve": "A load generator for a running server: one stream to many.",
}


@click.group()
def command() -> None:
    """Measure this machine; `ggufd bench load --help` says more."""


def _runner(kind: str) -> Callable[[tuple[str, ...]], int]:
    def run(arguments: tuple[str, ...]) -> int:
        try:
            outcome = importlib.import_module(f"streamer.bench.{kind}").main(list(arguments))
        except SystemExit as leave:  # argparse's end, of --help and of a usage error
            outcome = leave.code
        return outcome if isinstance(outcome, int) else 0

    return run


for _kind, _help in KINDS.items():
    command.add_command(
        click.Command(
            _kind,
            callback=_runner(_kind),
            params=[click.Argument(["arguments"], nargs=-1, type=click.UNPROCESSED)],
            context_settings={"ignore_unknown_options": True, "help_option_names": []},
            help=_help,
        )
    )
