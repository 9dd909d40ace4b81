"""config.py's table as click's parameters: the same names, words and refusals for every command."""

import click

from streamer.config import Option


def parameter(option: Option) -> click.Option:
    """Its value stays text: `load_config` reads it, and refuses it with exit code 78."""
    if option.is_switch:
        flags = [f"{option.flag}/--no-{option.flag[2:]}"]
        if option.name == "no_auth":
            flags = [option.flag]
        return click.Option(
            [*flags, option.name], is_flag=True, default=None, help=option.help, hidden=option.hidden
        )
    return click.Option(
        [option.flag, option.name], metavar=option.metavar, help=option.help, hidden=option.hidden
    )
