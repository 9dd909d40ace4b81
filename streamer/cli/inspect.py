"""`ggufd inspect`.

The residency plan of a model, without a GPU, after every check of file and options that `serve` makes.
"""

import json

import click

from streamer.cli.options import parameter
from streamer.config import OPTIONS, load_config
from streamer.device.host_memory import host_memory
from streamer.plan.render import plan_as_data, render_plan
from streamer.pull import model_path
from streamer.runtime.options import StartOptions
from streamer.runtime.planning import plan_model, read_model
from streamer.text.vocabulary import read_vocabulary

PLANNED = ("ctx", "max_sequences", "device", "kv_type")  # the options that a plan depends on


def _inspect(model: str, as_json: bool, debug: bool, **given: str | None) -> int:
    flags = {name: value for name, value in given.items() if value is not None}
    config = load_config(flags, environ={})
    path = model_path(model)
    directory, architecture = read_model(path)
    read_vocabulary(directory.metadata, path)
    kind, free_bytes = _target(config.device)
    planned = plan_model(
        directory,
        architecture,
        StartOptions.of(config, path).runtime,
        kind=kind,
        free_bytes=free_bytes,
    )
    notes = (*architecture.notes, *planned.notes)
    if as_json:
        data = plan_as_data(directory, planned.plan)
        print(json.dumps({**data, "device": kind, "kv_type": planned.kv_type, "notes": notes}))
    else:
        print(render_plan(directory, planned.plan))
        for note in notes:
            print(f"note: {note}")
    return 0


def _target(device: str) -> tuple[str, int | None]:
    """(kind, free bytes). Another machine's GPU is planned for without a budget."""
    kind = device.partition(":")[0]
    if kind == "auto":
        kind = "host"
    return kind, host_memory().free if kind == "host" else None


command = click.Command(
    "inspect",
    callback=_inspect,
    params=[
        click.Argument(["model"]),
        *(parameter(option) for option in OPTIONS if option.name in PLANNED),
        click.Option(["--json", "as_json"], is_flag=True, help="the plan as data"),
        click.Option(["--debug"], is_flag=True, help="tracebacks"),
    ],
    help=(
        "Print the residency plan of MODEL: what goes where, in which order, and whether it fits.\n\n"
        "For --device auto the plan is the host's; a GPU, which need not be there, is planned for without a "
        "budget."
    ),
)
