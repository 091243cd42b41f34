"""Which rows stand where, folded and unfolded."""

from __future__ import annotations

from gputop.timeline.model import Row
from gputop.tui.timeline.viewport import MAX_DEPTH, ScrolledPlaces, first_unfolded, gpu_folds, lines_per_gpu, places

ROWS = tuple(Row(i, *row) for i, row in enumerate([
    ("gpu", "GPU 0", "GPU 0", 0), ("stream", "Stream #1", "GPU 0", 0), ("stream", "Stream #2", "GPU 0", 0),
    ("gpu", "GPU 1", "GPU 1", 1), ("stream", "Stream #1", "GPU 1", 1),
    ("thread", "python", "Host node", None, 2), ("thread", "python", "Host node", None),
    ("thread", "python", "Host node", None), ("thread", "python", "Host node", None),
    ("thread", "tf_Compute/1", "Host node", None), ("thread", "tf_Compute/22", "Host node", None),
    ("thread", "tf_Compute/3", "Host node", None), ("thread", "tf_Compute/4", "Host node", None, 40),
    ("thread", "late", "Host node", None), ("stage", "Map", "tf.data", None),
]))


def labels(unfolded: frozenset[int] = frozenset()) -> list[str]:
    return [place.label for place in places(ROWS, unfolded)]


def test_folded_gpus_hide_streams_and_pools_are_one() -> None:
    assert labels() == ["GPU 0", "GPU 1", "Host node", "python", "python", "python", "python", "4× tf_Compute", "late",
                        "tf.data", "Map"]


def test_unfolding_a_gpu_a_pool_and_a_thread() -> None:
    by_label = {place.label: place.fold for place in places(ROWS, frozenset())}
    assert by_label["late"] is None and by_label["GPU 0"] is not None
    gpu = frozenset({by_label["GPU 0"]})
    assert labels(gpu)[:4] == ["GPU 0", "  Stream #1", "  Stream #2", "GPU 1"]
    pool = frozenset({by_label["4× tf_Compute"]})
    assert labels(pool)[7:12] == ["4× tf_Compute", "  tf_Compute/1", "  tf_Compute/22", "  tf_Compute/3",
                                  "  tf_Compute/4"]
    nested = [p for p in places(ROWS, frozenset({5})) if p.rows and p.rows[0].key == 5]
    assert [p.depth for p in nested] == [0, 1, 2] and [p.label for p in nested] == ["python", "", ""]
    deep = [p for p in places(ROWS, pool | {12}) if p.rows == (ROWS[12],)]
    assert len(deep) == MAX_DEPTH
    everything = places(ROWS, pool | gpu | {5, 12})
    assert len({p.key for p in everything if p.rows}) == len([p for p in everything if p.rows])


def test_at_first_is_unfolded_what_fits() -> None:
    assert first_unfolded(ROWS, 11) == frozenset()
    assert first_unfolded(ROWS, 13) == {0}, "a GPU with one stream looks the same as that"
    assert first_unfolded(ROWS, 30) == {0, 5}
    assert gpu_folds(ROWS) == {0, 3}


def test_gpus_grow_where_there_is_room() -> None:
    assert lines_per_gpu(ROWS, frozenset(), 11) == 1
    assert lines_per_gpu(ROWS, frozenset(), 13) == 2
    assert lines_per_gpu(ROWS, frozenset(), 99) == 3
    assert lines_per_gpu(ROWS[5:], frozenset(), 99) == 1
    grown = places(ROWS, frozenset(), 3)
    scrolled = ScrolledPlaces()
    scrolled.replace(grown)
    assert [scrolled.lines(i) for i in range(3)] == [range(3), range(3, 6), range(6, 7)]


def test_scrolling_keeps_within_the_places_and_shows_a_heading_above_its_first_row() -> None:
    scrolled, room = ScrolledPlaces(), 4
    assert not scrolled.shown(room) and scrolled.index_at(0) is None and not scrolled.scroll(3, room)
    scrolled.replace(places(ROWS, frozenset(), gpu_lines=2))  # 13 lines: two GPUs of two, and nine of one
    assert scrolled.scroll(100, room) and scrolled.top == 9 and not scrolled.scroll(1, room)
    assert [p.label for p in scrolled.shown(room)] == ["4× tf_Compute", "late", "tf.data", "Map"]
    assert scrolled.index_at(0) == 7 and scrolled.index_at(-9) == 0 and scrolled.index_at(4) is None
    assert scrolled.scroll_to(3, room) and scrolled.top == 4, "the first thread, under the heading of its host"
    assert not scrolled.scroll_to(3, room) and scrolled.scroll_to(0, room) and scrolled.top == 0
    assert scrolled.scroll(1, room) and scrolled.lines(0) == range(-1, 1), "half of GPU 0 is above the screen"
    assert next(p.label for p in scrolled.shown(room)) == "GPU 0"
    scrolled.put(6, 1)
    assert scrolled.lines(6).start == 1
    scrolled.put(0, 5)
    assert scrolled.top == 0, "there is nothing above the first place"
