"""Stop strings over token boundaries (case 37): nothing leaks, nothing is lost, however the text is cut."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from streamer.server.stops import StopMatcher

texts = st.text(alphabet="ab€", max_size=40)


def feed(stops, pieces):
    matcher = StopMatcher(stops)
    sent = "".join(matcher.push(piece) for piece in pieces)
    if matcher.matched is None:
        sent += matcher.flush()
    return sent, matcher.matched


def cut(text, places):
    marks = sorted({min(p, len(text)) for p in places} | {0, len(text)})
    return [text[a:b] for a, b in itertools.pairwise(marks)]


def expected(stops, text):
    """By definition: the first place where some stop string is complete."""
    for end in range(len(text) + 1):
        hits = [s for s in stops if text[:end].endswith(s)]
        if hits:
            longest = max(hits, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(
    texts,
    st.lists(st.text(alphabet="ab€", min_size=1, max_size=5), min_size=1, max_size=4),
    st.lists(st.integers(0, 40)),
)
def test_any_cut_gives_what_the_whole_text_gives(text, stops, places):
    assert feed(tuple(stops), cut(text, places)) == expected(stops, text)


def test_the_beginning_of_a_stop_is_held_until_it_is_known():
    matcher = StopMatcher(("STOP",))
    assert matcher.push("one ST") == "one "
    assert matcher.push("OR") == "STOR"
    assert matcher.push("STO") == ""
    assert matcher.push("P and more") == ""
    assert matcher.matched == "STOP"
    assert matcher.push("more") == ""


def test_without_stops_text_passes():
    matcher = StopMatcher(())
    assert matcher.push("abc") == "abc"
    assert matcher.flush() == ""
