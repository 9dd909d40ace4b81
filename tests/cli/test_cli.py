"""The command line from outside: exit codes, one-line refusals, what goes to which stream."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

DATA = Path(__file__).parents[1] / "data"


def ggufd(*arguments, stdin=b"", environment=None):
    command = [sys.executable, "-m", "streamer", *map(str, arguments)]
    return subprocess.run(command, input=stdin, capture_output=True, timeout=120, env=environment)


def test_help_lists_the_commands_and_not_the_hidden_one():
    answer = ggufd("--help")
    assert answer.returncode == 0
    for name in (b"serve", b"prompt", b"status", b"inspect", b"pull", b"tokenize", b"bench"):
        assert name in answer.stdout
    assert b"demo" not in answer.stdout
    kinds = ggufd("bench", "--help")
    assert kinds.returncode == 0
    for kind in (b"load", b"decode", b"serve"):
        assert kind in kinds.stdout
        assert ggufd("bench", kind.decode(), "--help").stdout.startswith(b"usage: ggufd bench " + kind)


@pytest.mark.parametrize("arguments", [["serve"], ["nonsense"], ["status", "--what"], ["inspect"]])
def test_usage_errors_are_2(arguments):
    answer = ggufd(*arguments)
    assert answer.returncode == 2
    assert b"Traceback" not in answer.stderr


def test_status_imports_neither_numpy_nor_a_server():
    code = (
        "import sys; from streamer.cli import run; run(None, ['status', '--socket', '/nowhere']);"
        "heavy = {'numpy', 'aiohttp', 'asyncio', 'rich', 'http', 'streamer.service'} & set(sys.modules);"
        "sys.exit(' '.join(heavy) if heavy else 0)"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    assert answer.returncode == 0, answer.stderr


def test_status_of_nobody_is_no():
    answer = ggufd("status", "--socket", "/nowhere/s")
    assert answer.returncode == 1
    assert answer.stderr.startswith(b"ggufd: /nowhere/s: no daemon serves there (No such file or directory)")
    assert ggufd("status", "--live", "--socket", "/nowhere/s").returncode == 1
    began = time.monotonic()
    assert ggufd("status", "--wait", "--timeout", "0.5", "--socket", "/nowhere/s").returncode == 1
    assert time.monotonic() - began > 0.5


def test_a_prompt_for_nobody_does_not_wait_for_ever():
    answer = ggufd("prompt", "Hello", "--socket", "/nowhere/s")
    assert answer.returncode == 1
    assert answer.stderr.startswith(b"ggufd: /nowhere/s: no daemon serves there")


def test_a_known_model_that_was_not_pulled_says_how(tmp_path):
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "CACHE_DIRECTORY": ""}
    for arguments in (["serve", "smollm2-135m", "--socket", tmp_path / "s"], ["inspect", "gemma-3-270m"]):
        answer = ggufd(*arguments, environment=environment)
        assert answer.returncode == 65
        assert f"`ggufd pull {arguments[1]}` fetches it".encode() in answer.stderr


def test_inspect_shows_the_plan_and_gives_it_as_data():
    answer = ggufd("inspect", DATA / "tiny-qwen3.gguf")
    assert answer.returncode == 0, answer.stderr
    assert b"in order" in answer.stdout
    plan = json.loads(ggufd("inspect", DATA / "tiny-qwen3.gguf", "--json", "--ctx", "64").stdout)
    assert plan["n_ctx"] == 64
    assert plan["architecture"] == "qwen3"
    orders = [w["order"] for s in plan["segments"] for w in s["weights"]]
    assert orders == sorted(orders)


def test_inspect_shows_a_name_that_is_not_utf8(tmp_path):
    model = Path(shutil.copy(DATA / "tiny-llama.gguf", tmp_path / "bad\udcff.gguf"))
    strict = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
    answer = ggufd("inspect", model, environment=strict)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.startswith(f"{tmp_path}/bad\\xff.gguf: llama".encode())
    plan = json.loads(ggufd("inspect", model, "--json").stdout)
    assert plan["model"] == plan["shards"][0]["path"] == f"{tmp_path}/bad\\xff.gguf"


def test_inspect_says_that_a_context_beyond_the_training_is_cut():
    answer = ggufd("inspect", DATA / "tiny-llama.gguf", "--ctx", "100000")
    assert answer.returncode == 0, answer.stderr
    assert b"note: ctx=100000 reduced=true n_ctx=" in answer.stdout
    assert b"reduced" not in ggufd("inspect", DATA / "tiny-llama.gguf").stdout


def test_inspect_plans_for_a_gpu_without_one():
    plan = json.loads(ggufd("inspect", DATA / "tiny-llama.gguf", "--json", "--device", "cuda").stdout)
    assert plan["device"] == "cuda"
    assert plan["free_bytes"] is None


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["inspect", "/nowhere.gguf"], 65),
        (["inspect", __file__], 65),
        (["inspect", DATA / "tiny-llama.gguf", "--device", "tpu"], 78),
        (["inspect", DATA / "tiny-llama.gguf", "--device", "cuda:x"], 78),
        (["inspect", DATA / "tiny-llama.gguf", "--device", "cuda:"], 78),
        (["inspect", DATA / "tiny-llama.gguf", "--device", "host:1"], 78),
        (["inspect", DATA / "tiny-llama.gguf", "--ctx", "-1"], 78),
        (["inspect", DATA / "tiny-llama.gguf", "--ctx", "20000000"], 78),
        (["inspect", DATA / "tiny-llama.gguf", "--max-sequences", "99999999999999999999999"], 78),
        (["inspect", DATA / "tiny-llama.gguf", "--kv-type", "f16", "--device", "host"], 78),
        (["pull", "no-such-model"], 2),
        (["tokenize", __file__], 65),
    ],
)
def test_refusals_are_one_line_with_their_code(arguments, code):
    answer = ggufd(*arguments)
    assert answer.returncode == code, answer.stderr
    assert b"Traceback" not in answer.stderr
    if code != 2:
        assert len(answer.stderr.splitlines()) == 1
        assert answer.stderr.startswith(b"ggufd: ")


def test_debug_shows_where_it_came_from():
    assert b"Traceback" in ggufd("inspect", __file__, "--debug").stderr


def test_tokenize_and_back(smollm2_path):
    text = "Hello, wörld! <|im_end|> 1234\n".encode()
    plain = ggufd("tokenize", smollm2_path, stdin=text)
    ids = json.loads(plain.stdout)
    assert 2 not in ids  # <|im_end|> is text here
    assert ggufd("tokenize", smollm2_path, "--detokenize", stdin=plain.stdout).stdout == text
    special = json.loads(ggufd("tokenize", smollm2_path, "--special", stdin=text).stdout)
    assert 2 in special
    back = ggufd("tokenize", smollm2_path, "--detokenize", "--special", stdin=json.dumps(special).encode())
    assert back.stdout == text


@pytest.mark.parametrize(
    ("options", "stdin"),
    [
        ([], b"\xff"),
        (["--detokenize"], b"x"),
        (["--detokenize"], b"[" * 100_000),
        (["--detokenize"], b"[999999]"),
    ],
)
def test_tokenize_refuses_what_it_cannot_read(smollm2_path, options, stdin):
    answer = ggufd("tokenize", smollm2_path, *options, stdin=stdin)
    assert answer.returncode == 2
    assert answer.stderr.startswith(b"ggufd: standard input")


def test_detokenized_text_is_utf8_whatever_the_terminal_shows(smollm2_path):
    ids = ggufd("tokenize", smollm2_path, stdin="wörld ✓".encode()).stdout
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii"}
    answer = ggufd("tokenize", smollm2_path, "--detokenize", stdin=ids, environment=ascii_only)
    assert answer.stdout == "wörld ✓".encode()


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        (
            "tokenize data/tiny-llama.gguf <&-",
            2,
            b"ggufd: standard input cannot be read: Bad file descriptor\n",
        ),
        (
            "inspect data/tiny-llama.gguf >&-",
            74,
            b"ggufd: standard output cannot be written: Bad file descriptor\n",
        ),
        (
            "inspect data/tiny-llama.gguf --json >/dev/full",
            74,
            b"ggufd: standard output cannot be written: No space left on device\n",
        ),
        ("--help >/dev/full", 74, b"ggufd: standard output cannot be written: No space left on device\n"),
        (
            "bench load --help >/dev/full",
            74,
            b"ggufd: standard output cannot be written: No space left on device\n",
        ),
        ("inspect /nowhere.gguf 2>&-", 65, b""),
        ("inspect /nowhere.gguf 2>/dev/full", 65, b""),
        ("inspect /nowhere.gguf <&- >&- 2>&-", 65, b""),
        ("inspect data/tiny-llama.gguf 2>&- >/dev/null", 0, b""),
        ("nonsense 2>/dev/full", 2, b""),
    ],
)
def test_streams_that_are_closed_or_full_leave_the_exit_code_alone(command, code, words):
    answer = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m streamer {command}"],
        cwd=DATA.parent,
        capture_output=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(DATA.parents[1])},
    )
    assert (answer.returncode, answer.stderr) == (code, words)


def test_text_of_the_command_line_must_be_utf8():
    for arguments in (["x\udcff"], ["x", "--system", "\udcff"]):
        answer = ggufd("prompt", *arguments, "--socket", "/nowhere/s")
        assert answer.returncode == 2
        assert b"is not UTF-8" in answer.stderr


def test_a_pull_without_a_network_says_so(tmp_path):
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}
    answer = ggufd("pull", "smollm2-135m", environment=environment)
    assert answer.returncode == 70
    (line,) = answer.stderr.splitlines()
    assert b"offline" in line
    assert not list(tmp_path.rglob("*.gguf"))


def test_a_reader_that_stops_reading_is_no_error():
    command = f"{sys.executable} -m streamer inspect {DATA}/tiny-llama.gguf --json | head -c 10"
    answer = subprocess.run(["bash", "-c", command], capture_output=True, timeout=60)
    assert answer.stderr == b""
