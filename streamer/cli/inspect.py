"""`ggufd inspect`.

The residency plan of a model, without a GPU, after every check of the file that `serve` makes.
"""

import json

import click

from streamer.device.host_memory import host_memory
from streamer.plan.render import plan_as_data, render_plan
from streamer.pull import model_path
from streamer.runtime.planning import PROFILES, RuntimeOptions, plan_model, read_model
from streamer.text.vocabulary import read_vocabulary


@click.command()
@click.argument("model")
@click.option("--ctx", type=click.IntRange(0), default=0, metavar="N", help="tokens a sequence may have")
@click.option("--max-sequences", type=click.IntRange(0), default=0, metavar="N", help="sequences at once")
@click.option(
    "--device", default="auto", metavar="NAME", help="plan for cuda or host [where serve would run]"
)
@click.option("--kv-type", default="auto", metavar="TYPE", help="type of cached keys and values")
@click.option("--json", "as_json", is_flag=True, help="the plan as data")
@click.option("--debug", is_flag=True, help="tracebacks")
def command(
    model: str, ctx: int, max_sequences: int, device: str, kv_type: str, as_json: bool, debug: bool
) -> int:
    """Print the residency plan of MODEL: what goes where, in which order, and whether it fits."""
    path = model_path(model)
    directory, architecture = read_model(path)
    read_vocabulary(directory.metadata, path)
    kind, free_bytes = _target(device)
    planned = plan_model(
        directory,
        architecture,
        RuntimeOptions(n_ctx=ctx, max_sequences=max_sequences, kv_type=kv_type),
        kind=kind,
        free_bytes=free_bytes,
    )
    if as_json:
        data = plan_as_data(directory, planned.plan)
        print(json.dumps({**data, "device": kind, "kv_type": planned.kv_type, "notes": architecture.notes}))
    else:
        print(render_plan(directory, planned.plan))
        for note in architecture.notes:
            print(f"note: {note}")
    return 0


def _target(device: str) -> tuple[str, int | None]:
    """(kind, free bytes). Another machine's GPU is planned for without a budget."""
    kind = device.partition(":")[0]
    if kind == "auto":
        kind = "host"
    if kind not in PROFILES:
        raise click.BadParameter("must be auto, host, cuda or cuda:N", param_hint="--device")
    return kind, host_memory().free if kind == "host" else None
