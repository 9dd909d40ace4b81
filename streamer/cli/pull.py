"""`ggufd pull`: known small models into the cache, with a bar."""

import sys

import click

from streamer.pull import KNOWN, find_known, pull


def pull_with_bar(name: str) -> str:
    """Pull, showing a bar on a terminal; returns the path."""
    model = find_known(name)
    if not sys.stderr.isatty():
        return str(pull(name))
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description:>8}"), BarColumn(40), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("pull", total=model.nbytes)
        path = pull(
            name, lambda what, done, total: bar.update(task, completed=done, total=total, description=what)
        )
        bar.update(task, completed=model.nbytes)
    return str(path)


@click.command()
@click.argument("name", metavar="NAME")
def command(name: str) -> int:
    """Fetch a known small model into the cache and check its SHA-256."""
    print(pull_with_bar(name))
    return 0


command.epilog = "Known: " + ", ".join(f"{m.name} ({m.nbytes / 1e6:.0f} MB, {m.licence})" for m in KNOWN)
