"""How many threads the host uses: what the process may, and BLAS one of them."""

import os

import numpy as np
import pytest
import threadpoolctl

from streamer.kernels.host_threads import HostProducts, SingleThreadedBlas, Team, allowed_cpus


def blas_threads():
    return [x["num_threads"] for x in threadpoolctl.threadpool_info() if x["user_api"] == "blas"]


def test_blas_gets_one_thread_and_its_old_count_back():
    with threadpoolctl.threadpool_limits(2, user_api="blas"):
        before = blas_threads()
        single = SingleThreadedBlas()
        assert set(blas_threads()) == {1}
        single.restore()
        assert blas_threads() == before


@pytest.mark.parametrize(
    ("text", "most"),
    [
        ("max 100000", None),
        ("100000 100000", 1),
        ("150000 100000", 2),
        ("10000 100000", 1),
        ("nonsense", None),
    ],
)
def test_cpus_are_those_of_the_affinity_within_the_quota(text, most, tmp_path):
    (tmp_path / "cpu.max").write_text(text)
    affinity = len(os.sched_getaffinity(0))
    assert allowed_cpus(tmp_path / "cpu.max") == (affinity if most is None else min(affinity, most))


def test_without_a_control_group_the_affinity_counts(tmp_path):
    assert allowed_cpus(tmp_path / "missing") == len(os.sched_getaffinity(0))


def test_measuring_replaces_the_guesses_by_what_a_core_gives():
    team = Team(1)
    products = HostProducts(team)
    products._seconds_per_byte = products._seconds_per_product = np.inf
    products.measure()
    assert 0 < products._seconds_per_byte < 1e-6
    assert 0 < products._seconds_per_product < 1e-6
    team.close()


def test_small_products_stay_with_the_calling_thread():
    team = Team(2)
    products = HostProducts(team)

    def refuse(*_):
        raise AssertionError("split")

    team.run = refuse
    assert products.multiply(np.ones((1, 64), np.float32), np.ones((2, 64, 32), np.float32)).shape == (1, 64)
    team.close()
