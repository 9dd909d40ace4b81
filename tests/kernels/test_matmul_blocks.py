"""Blocked weights: what is written comes back, and products equal plain ones for every count of rows."""

import numpy as np
import pytest

from streamer.kernels.host_threads import HostProducts, Team
from streamer.kernels.matmul import (
    BLOCK,
    UNPACKED,
    blocked_matmul,
    blocks_of,
    matmul_reference,
    read_rows,
    tile_rows,
    write_rows,
)

RNG = np.random.default_rng(4)


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def blocked(weight):
    blocks = np.zeros((blocks_of(len(weight)), weight.shape[1], BLOCK), np.float32)
    write_rows(blocks, 0, weight)
    return blocks


@pytest.mark.parametrize("pieces", [[100], [32, 68], [1, 30, 2, 67], [33, 64, 3], [5, 5, 5, 85]])
def test_rows_written_in_any_pieces_come_back(pieces):
    weight = normal(100, 24)
    blocks, first = np.zeros((4, 24, BLOCK), np.float32), 0
    for n in pieces:
        write_rows(blocks, first, weight[first : first + n])
        first += n
    assert np.array_equal(read_rows(blocks, np.arange(100)), weight)
    assert np.array_equal(read_rows(blocks, np.array([99, 0, 31, 32])), weight[[99, 0, 31, 32]])


@pytest.mark.parametrize("n_rows", [0, 1, 2, 7, 8, 31, 32, 33, 65, 96, 130])
@pytest.mark.parametrize(("n_in", "n_out"), [(24, 100), (1536, 64), (4096, 33)])
def test_blocked_product_equals_plain(n_rows, n_in, n_out):
    x, weight = normal(n_rows, n_in), normal(n_out, n_in)
    blocks = blocked(weight)
    out = np.full((n_rows, len(blocks) * BLOCK), np.nan, np.float32)
    blocked_matmul(x, blocks, out)
    want = x.astype(np.float64) @ weight.T.astype(np.float64)
    tolerance = 1e-5 + 2e-7 * n_in  # kernels that pack nothing add up a row's terms one after the other
    assert np.abs(out[:, :n_out] - want).max(initial=0) < tolerance
    assert np.abs(matmul_reference(x, weight) - want).max(initial=0) < tolerance


def test_ranges_of_blocks_fill_their_columns_only():
    x, weight = normal(37, 48), normal(128, 48)
    blocks = blocked(weight)
    out = np.full((37, 128), np.nan, np.float32)
    blocked_matmul(x, blocks, out, 1, 3)
    assert np.isnan(out[:, :32]).all()
    assert np.isnan(out[:, 96:]).all()
    assert np.abs(out[:, 32:96] - x @ weight[32:96].T).max() < 1e-4


@pytest.mark.parametrize("n_in", [16, 576, 1536, 5120, 40000])
def test_tiles_stay_below_the_size_from_which_blas_packs(n_in):
    tile = tile_rows(n_in)
    assert tile == 1 or tile * BLOCK * n_in <= UNPACKED


def test_columns_of_a_wider_matrix_are_accepted_as_input():
    wide, weight = normal(40, 96), normal(64, 48)
    blocks = blocked(weight)
    out = np.empty((40, 64), np.float32)
    blocked_matmul(wide[:, 48:], blocks, out)
    assert np.abs(out - wide[:, 48:] @ weight.T).max() < 1e-4


class TestTeam:
    @pytest.fixture
    def team(self):
        team = Team(3)
        yield team
        team.close()

    def test_every_piece_is_computed_once(self, team):
        for n in (1, 2, 50):
            counts = [0] * n

            def count(i, counts=counts):
                counts[i] += 1

            team.run(n, count)
            assert counts == [1] * n

    def test_first_error_of_a_piece_is_raised_and_the_team_works_on(self, team):
        def fail(i):
            if i == 3:
                raise ValueError("piece 3")

        with pytest.raises(ValueError, match="piece 3"):
            team.run(8, fail)
        done = []
        team.run(4, done.append)
        assert sorted(done) == [0, 1, 2, 3]

    def test_close_ends_the_helpers_and_may_be_repeated(self):
        team = Team(4)
        helpers = list(team._helpers)
        team.close()
        team.close()
        assert not any(helper.is_alive() for helper in helpers)
        done = []
        team.run(3, done.append)  # the calling thread alone
        assert done == [0, 1, 2]

    @pytest.mark.parametrize("n_rows", [1, 8, 40])
    def test_split_product_equals_whole(self, team, n_rows):
        x, weight = normal(n_rows, 64), normal(1000, 64)
        blocks = blocked(weight)
        products = HostProducts(team)
        products._seconds_per_product = products._seconds_per_byte = 1.0  # everything is worth splitting
        alone = np.empty((n_rows, len(blocks) * BLOCK), np.float32)
        blocked_matmul(x, blocks, alone)
        assert np.array_equal(products.multiply(x, blocks), alone)
