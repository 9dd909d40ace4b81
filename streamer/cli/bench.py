"""`ggufd bench`: hands over to the benchmarks."""

import importlib

import click

KINDS = ("load", "decode", "serve")


@click.command(context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("kind", type=click.Choice(KINDS))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(kind: str, arguments: tuple[str, ...]) -> int:
    """Measure loading, decoding or serving on this machine; `ggufd bench load --help` says more."""
    outcome = importlib.import_module(f"streamer.bench.{kind}").main(list(arguments))
    return outcome if isinstance(outcome, int) else 0
