"""From outcomes to numbers, and the picture of them."""

import xml.etree.ElementTree as ElementTree
from array import array

import pytest

from streamer.bench.serve_client import Outcome
from streamer.bench.serve_picture import picture_svg
from streamer.bench.serve_results import (
    histogram_median,
    make_group,
    probe_metrics,
    read_samples,
    server_metrics,
    summarize,
)


def outcome(start, arrivals, end, n_tokens, error=None, index=0):
    return Outcome(
        index, start, arrivals[0] if arrivals else end, end, array("d", arrivals), 10, n_tokens, error
    )


def test_rates_count_from_the_first_start_to_the_last_end():
    found = summarize([outcome(0.0, [1.0, 1.5, 2.0], 2.0, 3), outcome(1.0, [3.0, 4.0], 5.0, 7)])
    assert found["wall_s"] == 5.0
    assert found["tok_s"] == 10 / 5.0
    assert found["total_tok_s"] == 30 / 5.0
    assert found["requests_s"] == 2 / 5.0
    assert found["tokens_an_event"] == 10 / 5
    assert found["ttft_p50_ms"] == pytest.approx(1500)
    assert found["itl_p50_ms"] == pytest.approx(500)
    assert found["itl_p99_ms"] == pytest.approx(500 + 0.98 * 500)
    assert found["e2e_mean_ms"] == pytest.approx(3000)


def test_failed_requests_count_as_errors_and_lend_no_latency():
    found = summarize([outcome(0.0, [1.0], 1.0, 4), outcome(0.0, [], 3.0, 0, "503")])
    assert found["errors"] == 1
    assert found["requests"] == 2
    assert found["ttft_p99_ms"] == pytest.approx(1000)
    assert found["tok_s"] == pytest.approx(4 / 3)


def test_nothing_answered_gives_no_rates():
    assert summarize([outcome(0.0, [], 1.0, 0, "refused")]) == {"requests": 1.0, "errors": 1.0}
    assert summarize([]) == {"requests": 0.0, "errors": 0.0}


def test_probes_have_their_high_percentile():
    found = probe_metrics({"/livez": [0.001] * 2000 + [0.5] * 4, "/readyz": []}, failures=2)
    assert found["livez_p50_ms"] == pytest.approx(1)
    assert found["livez_p999_ms"] == pytest.approx(500)
    assert found["livez_probes"] == 2004
    assert found["probe_failures"] == 2
    assert "readyz_p50_ms" not in found


def steps(*counts):
    bounds = ("0.001", "0.002", "0.004", "+Inf")
    lines = [
        f'ggufd_step_seconds_bucket{{le="{b}",phase="host"}} {n}' for b, n in zip(bounds, counts, strict=True)
    ]
    others = 'ggufd_h2d_bytes_total{phase="serve",kind="weights"} 0.0\n# HELP x y\n'
    return read_samples("\n".join([*lines, 'ggufd_step_seconds_bucket{le="+Inf",phase="decode"} 99', others]))


def test_a_histograms_median_is_of_what_came_between():
    before, after = steps(100, 100, 100, 100), steps(100, 110, 120, 120)
    assert histogram_median(before, after, "ggufd_step_seconds", phase="host") == pytest.approx(0.002)
    assert histogram_median({}, steps(0, 0, 8, 8), "ggufd_step_seconds", phase="host") == pytest.approx(0.003)
    assert histogram_median(after, after, "ggufd_step_seconds", phase="host") is None
    assert histogram_median({}, {}, "ggufd_step_seconds", phase="host") is None


def test_the_servers_account_is_told_where_there_is_one():
    assert server_metrics(steps(0, 0, 0, 0), steps(10, 10, 10, 10)) == {
        "host_step_ms_p50": pytest.approx(0.5),
        "weight_h2d_bytes_serve": 0.0,
    }
    assert server_metrics({}, {}) == {}


def group(n):
    outcomes = [outcome(0.1 * i, [0.1 * i + 0.05, 0.1 * i + 0.07], 0.1 * i + 0.2, 2) for i in range(n)]
    return make_group(f"streams_{n}", f"{n} streams", n, outcomes, n)


@pytest.mark.parametrize("sizes", [(), (3,), (1, 4, 64)])
def test_the_picture_is_a_document_for_any_number_of_loops(sizes):
    document = ElementTree.fromstring(picture_svg([group(n) for n in sizes], "a <title> & more"))
    assert document.tag.endswith("svg")
    texts = [element.text for element in document.iter() if element.tag.endswith("text")]
    assert "a <title> & more" in texts
    circles = [element for element in document.iter() if element.tag.endswith("circle")]
    assert bool(circles) == bool(sizes)
    heights = {float(c.get("cy")) for c in circles}
    assert all(0 < y < float(document.get("height")) for y in heights)


def test_a_loop_where_nothing_was_answered_is_left_out_of_the_picture():
    failed = make_group("streams_9", "9 streams", 9, [outcome(0.0, [], 1.0, 0, "503")], 1)
    assert failed.errors == {"503": 1}
    assert "9 streams" not in picture_svg([group(2), group(4), failed], "t")
