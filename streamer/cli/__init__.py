"""The command line. Each command lives in its own module, imported when it is called: `ggufd status` starts
fast.

Knows: configuration, the HTTP routes, and for `inspect` and `tokenize` the rooms that read files.
Must not know: the service (given by __main__ as a function), how bytes move.
"""

import contextlib
import importlib
import sys
import traceback
from collections.abc import Callable, Sequence

import click

from streamer import __version__
from streamer.cli.stdio import OutputError, drop_output
from streamer.config import Config
from streamer.errors import GgufdError

Serve = Callable[[Config], int]

# name -> (module, help). Hidden commands have no help.
COMMANDS: dict[str, tuple[str, str]] = {
    "serve": ("serve", "Make a model resident and serve it, in the foreground."),
    "prompt": ("prompt", "Send a prompt to a running daemon and stream its answer."),
    "status": ("status", "Say how far the daemon is; exit 0 exactly when it is ready."),
    "inspect": ("inspect", "Print the residency plan of a model; needs no GPU."),
    "pull": ("pull", "Fetch a known small model into the cache."),
    "tokenize": ("tokenize", "Turn text into token ids, or back."),
    "bench": ("bench", "Measure loading, decoding and serving on this machine."),
    "demo": ("demo", ""),
}


class LazyGroup(click.Group):
    """Finds commands in COMMANDS and imports their modules on demand."""

    def list_commands(self, context: click.Context) -> list[str]:
        return [name for name, (_, text) in COMMANDS.items() if text]

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command = importlib.import_module(f"streamer.cli.{COMMANDS[name][0]}").command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items() if text])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="ggufd")
def cli() -> None:
    """Makes a GGUF model resident on one device as fast as the link allows, and serves it over a local
    socket.
    """


def run(serve: Serve, arguments: Sequence[str] | None = None) -> int:
    """The whole command line; returns the exit code of INTERFACE's table.

    One line on stderr for every refusal.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        outcome = cli.main(list(arguments), prog_name="ggufd", standalone_mode=False, obj=serve)
        sys.stdout.flush()  # here, where it can still be told that this fails
        return outcome if isinstance(outcome, int) else 0
    except click.exceptions.Abort:
        return 130
    except click.exceptions.Exit as leave:
        return leave.exit_code
    except click.ClickException as error:
        with contextlib.suppress(OSError):
            error.show()
        return error.exit_code
    except GgufdError as error:
        if isinstance(error, OutputError):
            drop_output()
        _complain(str(error), debug="--debug" in arguments)
        return error.exit_code
    except BrokenPipeError:  # our reader (head, less) is gone: say no more
        drop_output()
        return 141
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # noqa: BLE001 - the last border: a fault of ours becomes one line and its exit code
        _complain(f"internal error: {type(error).__name__}: {error}", debug="--debug" in arguments)
        return GgufdError.exit_code


def _complain(text: str, *, debug: bool) -> None:
    """One line. Where not even that can be written the exit code has to do."""
    with contextlib.suppress(OSError):
        if debug:
            traceback.print_exc()
        print(f"ggufd: {text}", file=sys.stderr)
