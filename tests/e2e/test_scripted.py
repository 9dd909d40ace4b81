"""Exact bytes from a model whose next token is a function of the last (cases 23, 24, 36, 37, 40 and
invariant 2).
"""

import json
import socket

import pytest


@pytest.fixture
def serve(start, make_scripted, tmp_path):
    def go(chain, *options, **members):
        return start(make_scripted(tmp_path / "m.gguf", chain, **members), *options)

    return go


def text_of(answer):
    return answer.json["choices"][0]["text"]


def stream_bytes(daemon, **members):
    """The raw bytes of a streamed completion's body, one recv at a time."""
    body = json.dumps({"stream": True, "temperature": 0, **members}).encode()
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(daemon.path)
        head = b"POST /v1/completions HTTP/1.0\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
        client.sendall(head + body)
        pieces = []
        while piece := client.recv(65536):
            pieces.append(piece)
    return b"".join(pieces).partition(b"\r\n\r\n")[2]


def test_the_chain_comes_out_and_ends(serve, scripted):
    daemon = serve([*scripted.ids("abcdef"), 2])
    answer = daemon.complete(prompt=scripted.ids("a"), temperature=0, max_tokens=20)
    assert text_of(answer) == "bcdef"
    assert answer.json["choices"][0]["finish_reason"] == "stop"


def test_the_end_of_turn_ends_an_answer_and_the_beginning_is_there_once(serve, scripted):
    """Case 24."""
    daemon = serve([*scripted.ids("ab"), scripted.end_of_turn], more={3: 10})
    answer = daemon.complete(prompt=scripted.ids("a"), temperature=0, max_tokens=20)
    assert text_of(answer) == "b"
    assert answer.json["choices"][0]["finish_reason"] == "stop"
    for content in ("a", "<s>a"):
        ids = daemon.post("/tokenize", {"content": content, "add_special": True}).json["tokens"]
        assert ids.count(1) == 1


def test_padded_rows_are_never_sampled(serve, scripted):
    """Case 23: after `b` row 60, which has no token, is the largest."""
    daemon = serve(scripted.ids("ab"), more={scripted.ids("b")[0]: 60})
    for temperature in (0, 1.0):
        answer = daemon.complete(
            prompt=scripted.ids("a"), temperature=temperature, max_tokens=8, ignore_eos=True, logprobs=0
        )
        ids = answer.json["choices"][0]["logprobs"]["ids"]
        assert all(i < len(scripted.tokens) for i in ids)


def test_an_emoji_in_four_tokens_arrives_whole(serve, scripted):
    """Case 36: every chunk is UTF-8, nothing is lost, nothing invented."""
    daemon = serve([*scripted.ids("a"), *scripted.emoji, *scripted.ids("b"), 2])
    raw = stream_bytes(daemon, prompt=scripted.ids("a"), max_tokens=20)
    events = [json.loads(x[6:]) for x in raw.decode().splitlines() if x.startswith("data: {")]
    pieces = [e["choices"][0]["text"] for e in events]
    assert "".join(pieces) == "\U0001f600b"
    assert not any("\ufffd" in p for p in pieces)
    cut = daemon.complete(prompt=scripted.ids("a"), temperature=0, max_tokens=2)
    assert text_of(cut) == "\ufffd"  # two of four bytes: said to be unfinished, not dropped


def test_stop_strings_cut_exactly(serve, scripted):
    """Case 37."""
    daemon = serve([*scripted.ids("abcdefghij"), 2])
    for stop, expected in ((["def"], "bc"), (["defx", "ghij"], "bcdef"), (["xyz"], "bcdefghij"), (["b"], "")):
        answer = daemon.complete(prompt=scripted.ids("a"), temperature=0, max_tokens=30, stop=stop)
        assert text_of(answer) == expected
        raw = stream_bytes(daemon, prompt=scripted.ids("a"), max_tokens=30, stop=stop)
        events = [json.loads(x[6:]) for x in raw.decode().splitlines() if x.startswith("data: {")]
        assert "".join(e["choices"][0]["text"] for e in events) == expected


def test_one_token_over_the_context_is_refused_and_a_full_context_gives_one(serve, scripted):
    """Case 40."""
    daemon = serve([*scripted.ids("ab"), 2], "--ctx", "32", n_ctx=64)
    a = scripted.ids("a")
    over = daemon.complete(prompt=a * 33, temperature=0)
    assert over.status == 400
    assert (over.json["error"]["n_prompt_tokens"], over.json["error"]["n_ctx"]) == (33, 32)
    full = daemon.complete(prompt=a * 32, temperature=0)
    assert text_of(full) == "b"
    assert full.json["choices"][0]["finish_reason"] == "length"


def test_after_ready_no_weight_byte_ever_moves_and_ready_was_said_once(serve, scripted):
    """Invariant 2."""
    daemon = serve([*scripted.ids("abc"), 2])
    loaded = daemon.metric('ggufd_h2d_bytes_total{kind="weights",phase="load"}')
    assert loaded == daemon.get("/residency").json["bytes_total"]
    for _ in range(5):
        answer = daemon.complete(prompt=scripted.ids("a"), temperature=0)
        assert answer.json["ggufd"]["weight_h2d_bytes"] == 0
    assert daemon.metric('ggufd_h2d_bytes_total{kind="weights",phase="serve"}') == 0
    assert daemon.metric('ggufd_h2d_bytes_total{kind="weights",phase="load"}') == loaded
    assert daemon.stop() == 0
    assert daemon.lines.count("READY=1") == 1


def test_prompts_a_b_a_give_the_same_a(serve, scripted):
    """Case 34 on a dense model, and with what the prefix cache kept."""
    daemon = serve([*scripted.ids("abcdef"), 2])
    prompts = [scripted.ids("a") * 40, scripted.ids("c") * 40, scripted.ids("a") * 40]
    first, _, again = (daemon.complete(prompt=p, temperature=0, logprobs=3).json for p in prompts)
    assert first["choices"] == again["choices"]
    assert again["ggufd"]["cached_prompt_tokens"] > 0
