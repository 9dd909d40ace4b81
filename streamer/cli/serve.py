"""`ggufd serve`: options from config.py's table, then the service."""

from typing import Any

import click

from streamer.cli.options import parameter
from streamer.config import OPTIONS, load_config
from streamer.errors import ConfigError


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
        *(parameter(option) for option in OPTIONS if option.name != "model"),
    ],
    help=(
        "Make MODEL (a GGUF file or a pulled name) resident and serve it on a Unix socket.\n\n"
        "Every option can also come from the environment (GGUFD_MAX_QUEUE for --max-queue) or the TOML file; "
        "flag beats environment beats file."
    ),
)
