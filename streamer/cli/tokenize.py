"""`ggufd tokenize`: text to ids and back, by the model's own vocabulary; works on vocabulary-only files."""

import json
import sys

import click

from streamer.errors import GgufdError
from streamer.gguf.reader import read_directory
from streamer.pull import model_path
from streamer.text.tokenizer import build_tokenizer


class BadInputError(GgufdError):
    """Standard input is not what the command reads."""

    exit_code = 2


@click.command()
@click.argument("model")
@click.option(
    "--detokenize", is_flag=True, help="a JSON list of ids on standard input, text on standard output"
)
@click.option(
    "--special", is_flag=True, help="names of control tokens in the text are those tokens, both ways"
)
@click.option("--add-special", is_flag=True, help="put the beginning and end tokens that the model wants")
def command(model: str, detokenize: bool, special: bool, add_special: bool) -> int:
    """Text on standard input becomes a JSON list of token ids on standard output."""
    path = model_path(model)
    tokenizer = build_tokenizer(read_directory(path).metadata, path=path)
    data = sys.stdin.buffer.read()
    if detokenize:
        sys.stdout.write(tokenizer.decode(_ids(data, tokenizer.n_tokens), special=special))
        return 0
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise BadInputError(f"standard input is not UTF-8: {error}") from None
    print(json.dumps(tokenizer.encode(text, add_special=add_special, parse_special=special)))
    return 0


def _ids(data: bytes, n_tokens: int) -> list[int]:
    try:
        ids = json.loads(data)
    except ValueError as error:
        raise BadInputError(f"standard input is not JSON: {error}") from None
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < n_tokens for i in ids):
        raise BadInputError(f"standard input must be a JSON list of ids from 0 to {n_tokens - 1}")
    return ids
