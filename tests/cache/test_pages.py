import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamer.cache.pages import ROOT, PagePool, page_names
from streamer.cache.snapshots import SnapshotTable


def ids_of(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_a_page_name_says_everything_before_it():
    names = page_names(ids_of(1, 2, 3, 4), 2)
    assert len(names) == 2
    assert page_names(ids_of(9, 2, 3, 4), 2)[1] != names[1]
    assert page_names(ids_of(3, 4), 2, names[0]) == names[1:]
    assert page_names(ids_of(3, 4), 2, ROOT) != names[1:]


def test_a_partly_filled_page_has_no_name():
    assert page_names(ids_of(1), 2) == []
    assert page_names(ids_of(1, 2, 3), 2) == page_names(ids_of(1, 2), 2)


def test_equal_prefixes_share_pages():
    pool = PagePool(4, 2)
    names = page_names(ids_of(1, 2, 3, 4), 2)
    first = pool.allocate([], 2)
    for page, name in zip(first, names, strict=True):
        pool.register(page, name)
    second = pool.allocate(pool.match_prefix(names), 1)
    assert second[:2] == first
    pool.check_integrity([first, second])
    assert pool.statistics().used == 3
    pool.release(first)
    pool.check_integrity([second])
    assert pool.match_prefix(names) == second[:2]


def test_a_released_page_without_a_name_is_free_and_one_with_a_name_is_cached():
    pool = PagePool(3, 2)
    pages = pool.allocate([], 2)
    pool.register(pages[0], b"a")
    pool.release(pages)
    statistics = pool.statistics()
    assert (statistics.free, statistics.used, statistics.cached) == (2, 0, 1)
    assert pool.n_available == 3


def test_an_allocation_that_does_not_fit_changes_nothing():
    pool = PagePool(3, 2)
    kept = pool.allocate([], 1)
    pool.register(kept[0], b"a")
    pool.release(kept)
    assert pool.allocate(kept, 3) is None  # reviving the cached page leaves two
    pool.check_integrity()
    assert pool.statistics().cached == 1
    assert pool.allocate(kept, 2) is not None


def test_the_least_recently_released_prefix_is_evicted_first_and_its_tail_before_its_head():
    pool = PagePool(4, 1)
    old, new = pool.allocate([], 2), pool.allocate([], 2)
    for page, name in zip([*old, *new], [b"o1", b"o2", b"n1", b"n2"], strict=True):
        pool.register(page, name)
    pool.release(old)
    pool.release(new)
    evicted = [pool.extend() for _ in range(4)]
    assert evicted == [old[1], old[0], new[1], new[0]]
    assert pool.extend() is None
    assert pool.statistics().evictions == 4
    assert pool.match_prefix([b"n1"]) == []


def test_a_second_page_of_the_same_content_stays_private():
    pool = PagePool(2, 1)
    first, second = pool.allocate([], 1), pool.allocate([], 1)
    pool.register(first[0], b"a")
    pool.register(second[0], b"a")
    pool.release(second)
    assert pool.statistics().free == 1
    assert pool.match_prefix([b"a"]) == first


def test_distrusted_content_is_shared_no_more():
    pool = PagePool(2, 1)
    pages = pool.allocate([], 1)
    pool.register(pages[0], b"a")
    other = pool.allocate(pool.match_prefix([b"a"]), 0)
    pool.release(pages, forget=True)
    assert pool.match_prefix([b"a"]) == []
    pool.check_integrity([other])
    pool.release(other)
    assert pool.statistics().free == 2


def test_clearing_the_cache_keeps_used_pages():
    pool = PagePool(3, 1)
    pages = pool.allocate([], 2)
    for page, name in zip(pages, [b"a", b"b"], strict=True):
        pool.register(page, name)
    pool.release(pages[1:])
    assert pool.clear_cache() == 1
    assert pool.match_prefix([b"a", b"b"]) == pages[:1]
    pool.check_integrity([pages[:1]])


def test_releasing_twice_is_noticed():
    pool = PagePool(1, 1)
    pages = pool.allocate([], 1)
    pool.release(pages)
    with pytest.raises(AssertionError, match="more often"):
        pool.release(pages)


def test_integrity_notices_a_leak():
    pool = PagePool(2, 1)
    pool.allocate([], 1)
    with pytest.raises(AssertionError, match="references"):
        pool.check_integrity([])


def test_a_pool_without_pages_is_refused():
    with pytest.raises(ValueError, match="holds nothing"):
        PagePool(0, 16)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 1), max_size=10)), max_size=60),
    st.integers(1, 8),
)
def test_no_sequence_of_operations_loses_a_page(operations, n_pages):
    """Binary ids, so that prefixes collide often; whatever is matched holds exactly the ids asked for."""
    pool = PagePool(n_pages, 2)
    held: list[list[int]] = []
    content: dict[int, tuple[int, ...]] = {}
    for kind, ids in operations:
        if kind == 0 and held:
            pool.release(held.pop(len(ids) % len(held)))
        elif kind == 1 and held and (page := pool.extend()) is not None:
            held[len(ids) % len(held)].append(page)
            content.pop(page, None)
        elif kind >= 2:
            names = page_names(ids_of(*ids), 2)
            shared = pool.match_prefix(names)
            for i, page in enumerate(shared):
                assert content[page] == tuple(ids[: 2 * i + 2])
            pages = pool.allocate(shared, len(names) - len(shared))
            if pages is not None:
                held.append(pages)
                for i in range(len(shared), len(names)):
                    content[pages[i]] = tuple(ids[: 2 * i + 2])
                    pool.register(pages[i], names[i])
        pool.check_integrity(held)
    for pages in held:
        pool.release(pages)
    pool.check_integrity()
    assert pool.n_available == n_pages


def test_the_deepest_snapshot_of_a_prefix_is_found():
    table = SnapshotTable([7, 8])
    assert table.claim(b"a") == 7
    assert table.claim(b"b") == 8
    assert table.find([b"a", b"x", b"b"]) == (3, 8)
    assert table.find([b"a", b"x"]) == (1, 7)
    assert table.find([b"x"]) is None
    assert table.claim(b"a") is None  # it is there


def test_the_least_recently_used_snapshot_makes_room():
    table = SnapshotTable([7, 8])
    table.claim(b"a")
    table.claim(b"b")
    table.find([b"a"])
    assert table.claim(b"c") == 8
    assert table.find([b"b"]) is None
    assert table.find([b"a"]) == (1, 7)
    table.check_integrity()


def test_a_forgotten_snapshot_frees_its_slot_and_no_slots_means_no_snapshots():
    table = SnapshotTable([7])
    table.claim(b"a")
    table.forget([b"a", b"never"])
    assert table.find([b"a"]) is None
    table.check_integrity()
    assert len(table) == 0
    assert SnapshotTable([]).claim(b"a") is None
