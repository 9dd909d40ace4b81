"""The client's commands against a running daemon."""

import json
import os
import subprocess
import sys

import pytest


@pytest.fixture
def ggufd(smollm2):
    def go(*arguments, stdin=b""):
        environment = {**os.environ, "GGUFD_SOCKET": smollm2.path}
        command = [sys.executable, "-m", "streamer", *arguments]
        return subprocess.run(command, input=stdin, capture_output=True, timeout=120, env=environment)

    return go


def test_status_says_yes(ggufd):
    answer = ggufd("status")
    assert answer.returncode == 0
    assert answer.stdout.startswith(b"ready: SmolLM2")
    assert json.loads(ggufd("status", "--json").stdout)["status"] == "ready"
    assert ggufd("status", "--live").stdout == b"alive\n"
    assert ggufd("status", "--wait", "--ready", "--timeout", "10").returncode == 0


def test_status_answers_by_its_exit_code_where_nobody_takes_the_words(smollm2):
    for closed in (">&-", ">/dev/full"):
        command = f"{sys.executable} -m streamer status --socket {smollm2.path} {closed}"
        answer = subprocess.run(["bash", "-c", command], capture_output=True, timeout=60)
        assert (answer.returncode, answer.stderr) == (0, b"")


def test_a_prompt_that_is_not_utf8_is_a_usage_error(ggufd):
    answer = ggufd("prompt", "-", stdin=b"\xff")
    assert answer.returncode == 2
    assert answer.stderr.startswith(b"ggufd: standard input is not UTF-8")


def test_prompt_streams_an_answer(ggufd):
    asked = ("--temperature", "0", "--max-tokens", "12")
    answer = ggufd("prompt", "What is the capital of France?", *asked)
    assert answer.returncode == 0, answer.stderr
    assert b"Paris" in answer.stdout
    piped = ggufd("prompt", "-", *asked, stdin=b"What is the capital of France?")
    assert piped.stdout == answer.stdout
    whole = json.loads(ggufd("prompt", "What is the capital of France?", *asked, "--json").stdout)
    assert whole["choices"][0]["message"]["content"] + "\n" == answer.stdout.decode()
    raw = ggufd("prompt", "The capital of France is", "--raw", *asked)
    assert b"Paris" in raw.stdout
    system = ggufd("prompt", "Hello", "--system", "Be brief.", "--seed", "1", "--max-tokens", "4")
    assert system.returncode == 0


def test_a_refused_prompt_says_why(ggufd):
    answer = ggufd("prompt", "x", "--temperature", "9")
    assert answer.returncode == 1
    assert answer.stderr.startswith(b"ggufd: HTTP 400: temperature must be")
