"""`ggufd tokenize`: text to ids and back, by the model's own vocabulary; works on vocabulary-only files."""

import json

import click

from streamer.cli.stdio import BadInputError, read_bytes, read_text, write_utf8
from streamer.gguf.reader import read_directory
from streamer.pull import model_path
from streamer.text.tokenizer import build_tokenizer


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
    if detokenize:
        write_utf8(tokenizer.decode(_ids(read_bytes(), tokenizer.n_tokens), special=special))
        return 0
    print(json.dumps(tokenizer.encode(read_text(), add_special=add_special, parse_special=special)))
    return 0


def _ids(data: bytes, n_tokens: int) -> list[int]:
    try:
        ids = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadInputError(f"standard input is not JSON: {error}") from None
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < n_tokens for i in ids):
        raise BadInputError(f"standard input must be a JSON list of ids from 0 to {n_tokens - 1}")
    return ids
