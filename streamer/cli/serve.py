"""`ggufd serve`: options from config.py's table, then the service."""

from typing import Any

import click

from streamer.config import OPTIONS, Option, load_config
from streamer.errors import ConfigError


def _parameter(option: Option) -> click.Option:
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


def _serve(model: str | None, config_file: str, **given: Any) -> int:
    flags = {name: value for name, value in given.items() if value is not None}
    if model is not None:
        flags["model"] = model
    config = load_config(flags, file=config_file)
    if not config.model:
        raise click.UsageError("give a MODEL (argument, GGUFD_MODEL, or model in the configuration file)")
    code = click.get_current_context().obj(config)
    if not isinstance(code, int):
        raise ConfigError("the service gave no exit code")
    return code


command = click.Command(
    "serve",
    callback=_serve,
    params=[
        click.Argument(["model"], required=False),
        click.Option(
            ["--config", "config_file"],
            metavar="FILE",
            default="",
            help="TOML file with any of these options",
        ),
        *(_parameter(option) for option in OPTIONS if option.name != "model"),
    ],
    help=(
        "Make MODEL (a GGUF file or a pulled name) resident and serve it on a Unix socket.\n\n"
        "Every option can also come from the environment (GGUFD_MAX_QUEUE for --max-queue) or the TOML file; "
        "flag beats environment beats file."
    ),
)
