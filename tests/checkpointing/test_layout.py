# SPDX-License-Identifier: BSD-3-Clause
"""The byte layout. What must hold: every byte of every view is in exactly one region, at its place, and once.

The views here are random integers; memory is a Python set of byte addresses. No torch.
"""

from __future__ import annotations

import itertools
import random
import unittest

from tests import load

layout = load("checkpointing._layout")
View = layout.View

ITEMSIZES = (1, 2, 4, 8, 16)


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


def element_bytes(view: layout.View) -> list[tuple[tuple[int, ...], int]]:
    """Every index of a view and the address of its element's first byte."""
    return [
        (index, view.start + view.itemsize * sum(i * step for i, step in zip(index, view.stride)))
        for index in itertools.product(*map(range, view.shape))
    ]


def bytes_of(view: layout.View) -> set[int]:
    return {at + i for _, at in element_bytes(view) for i in range(view.itemsize)}


def random_view(rng: random.Random, storages: int = 3, room: int = 400) -> layout.View:
    itemsize = rng.choice(ITEMSIZES)
    shape = tuple(rng.choice((0, 1, 1, 2, 3, 4)) for _ in range(rng.randrange(4)))
    stride = list(contiguous(shape))
    kind = rng.randrange(6)
    if kind == 1:  # another order of the dimensions
        order = rng.sample(range(len(shape)), len(shape))
        shape, stride = tuple(shape[d] for d in order), [stride[d] for d in order]
    elif kind == 2:  # gaps
        factor = rng.randint(2, 4)
        stride = [step * factor for step in stride]
    elif kind == 3:  # expanded
        stride = [0 if rng.random() < 0.5 else step for step in stride]
    elif kind == 4:  # anything at all, overlaps with itself included
        stride = [rng.randrange(6) for _ in stride]
    start = rng.randrange(room // itemsize) * itemsize
    return View(rng.randrange(storages), start, itemsize, shape, tuple(stride))


def schedules(count: int, seed: int) -> list[list[layout.View]]:
    rng = random.Random(seed)
    return [[random_view(rng) for _ in range(rng.randrange(12))] for _ in range(count)]


class LayOut(unittest.TestCase):
    def test_every_byte_is_in_exactly_one_region_at_its_place(self) -> None:
        for number, views in enumerate(schedules(400, seed=1)):
            with self.subTest(schedule=number):
                self.check(views, layout.lay_out(views))

    def check(self, views: list[layout.View], found: layout.Layout) -> None:
        self.assertEqual(len(found.places), len(views))
        # the address that each byte of a region stands for
        regions = [self.addresses(region, views) for region in found.regions]
        for storage in {view.storage for view in views}:
            everywhere = [
                at
                for region, held in zip(found.regions, regions)
                if region.storage == storage and region.view is None
                for at in held
            ]
            self.assertEqual(len(everywhere), len(set(everywhere)), "plain regions overlap")
            packed = [
                set(held) for r, held in zip(found.regions, regions) if r.storage == storage and r.view is not None
            ]
            for one, other in itertools.combinations([*packed, set(everywhere)], 2):
                self.assertFalse(one & other, "a byte is in two regions")
        for view, place in zip(views, found.places):
            if not bytes_of(view):
                self.assertEqual(place, layout.Place(-1, 0))
                continue
            region, held = found.regions[place.region], regions[place.region]
            self.assertEqual(region.storage, view.storage)
            stride = view.stride if region.view is None else layout.packed_stride(view.shape, view.stride)
            for index, at in element_bytes(view):
                lies = place.offset + view.itemsize * sum(i * step for i, step in zip(index, stride))
                self.assertEqual(held[lies : lies + view.itemsize], list(range(at, at + view.itemsize)))

    def addresses(self, region: layout.Region, views: list[layout.View]) -> list[int]:
        if region.view is None:
            return list(range(region.start, region.start + region.nbytes))
        view = views[region.view]
        stride = layout.packed_stride(view.shape, view.stride)
        held = [-1] * region.nbytes
        for index, at in element_bytes(view):
            lies = view.itemsize * sum(i * step for i, step in zip(index, stride))
            held[lies : lies + view.itemsize] = range(at, at + view.itemsize)
        self.assertNotIn(-1, held, "a packed region has a gap")
        return held

    def test_a_region_that_is_laid_out_anew_keeps_every_view_aligned(self) -> None:
        for number, views in enumerate(schedules(300, seed=2)):
            found = layout.lay_out(views)
            for view, place in zip(views, found.places):
                if place.region >= 0:
                    region = found.regions[place.region]
                    self.assertLess(region.lead, layout.ALIGNMENT)
                    self.assertEqual((region.lead + place.offset) % view.itemsize, 0, number)

    def test_never_more_than_the_span_nor_less_than_the_elements(self) -> None:
        for views in schedules(400, seed=3):
            found = layout.lay_out(views)
            total = sum(region.nbytes for region in found.regions)
            distinct = len({(view.storage, at) for view in views for at in bytes_of(view)})
            spans = set()
            for view in views:
                nbytes = layout.span(view.shape, view.stride) * view.itemsize
                spans |= {(view.storage, at) for at in range(view.start, view.start + nbytes)}
            self.assertGreaterEqual(total, distinct)
            self.assertLessEqual(total, len(spans))

    def test_large_regions_come_in_order_of_use_and_small_ones_by_size(self) -> None:
        rng = random.Random(4)
        views = [
            View(i, 0, 1, (rng.choice((5, 900, layout.SMALL_BYTES, layout.SMALL_BYTES + 1, 1 << 24)),), (1,))
            for i in range(200)
        ]
        found = layout.lay_out(views)
        large, small = found.regions[: found.large], found.regions[found.large :]
        self.assertTrue(all(region.nbytes > layout.SMALL_BYTES for region in large))
        self.assertTrue(all(region.nbytes <= layout.SMALL_BYTES for region in small))
        self.assertEqual([r.storage for r in large], sorted(r.storage for r in large))
        self.assertEqual([r.nbytes for r in small], sorted(r.nbytes for r in small))

    def test_nothing(self) -> None:
        self.assertEqual(layout.lay_out([]), layout.Layout([], 0, []))
        self.assertEqual(layout.lay_out([View("s", 0, 4, (0, 3), (3, 1))]).places, [layout.Place(-1, 0)])


class WhatIsSent(unittest.TestCase):
    """Aliases cross once."""

    def sent(self, *views: layout.View) -> int:
        return sum(region.nbytes for region in layout.lay_out(views).regions)

    def test_a_tie(self) -> None:
        view = View("s", 0, 4, (1000, 1000), (1000, 1))
        self.assertEqual(self.sent(view, view), 4_000_000)

    def test_a_tie_with_a_transposed_view(self) -> None:
        views = [View("s", 0, 4, (10, 20), (20, 1)), View("s", 0, 4, (20, 10), (1, 20))]
        self.assertEqual(self.sent(*views), 800)

    def test_eight_views_of_one_buffer(self) -> None:
        nbytes = 16 << 20
        views = [View("s", i * nbytes // 8, 1, (nbytes // 8,), (1,)) for i in range(8)]
        self.assertEqual(self.sent(*views), nbytes)
        self.assertEqual(self.sent(*[View("s", 0, 1, (nbytes,), (1,))] * 8), nbytes)

    def test_overlapping_views(self) -> None:
        views = [View("s", start, 4, (1000,), (1,)) for start in (0, 400, 2000, 3996)]
        self.assertEqual(self.sent(*views), 3996 + 4000)

    def test_a_little_slice_of_a_large_buffer(self) -> None:
        self.assertEqual(self.sent(View("16 MB", 5 << 20, 1, (1024,), (1,))), 1024)

    def test_two_slices_far_apart(self) -> None:
        self.assertEqual(self.sent(View("s", 0, 4, (16,), (1,)), View("s", 1 << 20, 4, (16,), (1,))), 128)

    def test_expanded(self) -> None:
        self.assertEqual(self.sent(View("s", 0, 4, (1000, 7), (0, 1))), 28)
        self.assertEqual(self.sent(View("s", 8, 8, (1 << 40,), (0,))), 8)

    def test_a_column(self) -> None:
        column = View("s", 12, 4, (1000,), (1000,))
        self.assertEqual(self.sent(column), 4000)
        self.assertEqual(self.sent(column, column), 4000)

    def test_a_sliding_window_is_not_unrolled(self) -> None:
        self.assertEqual(self.sent(View("s", 0, 4, (901, 100), (1, 1))), 4000)

    def test_views_of_different_storages_never_meet(self) -> None:
        self.assertEqual(len(layout.lay_out([View("a", 0, 4, (8,), (1,)), View("b", 0, 4, (8,), (1,))]).regions), 2)


class Strides(unittest.TestCase):
    """The packed copy of a view: as small as its distinct elements, in the same order of dimensions."""

    def test_packing_is_dense_idempotent_and_keeps_what_is_expanded(self) -> None:
        rng = random.Random(5)
        for _ in range(2000):
            view = random_view(rng)
            packed = layout.packed_stride(view.shape, view.stride)
            with self.subTest(shape=view.shape, stride=view.stride):
                self.assertTrue(layout.is_dense(view.shape, packed))
                self.assertEqual(layout.packed_stride(view.shape, packed), packed)
                for size, step, before in zip(view.shape, packed, view.stride):
                    if size > 1:
                        self.assertEqual(step == 0, before == 0)

    def test_a_dense_view_is_its_own_packing(self) -> None:
        for shape, stride in (((2, 3, 4), (12, 4, 1)), ((4, 3), (1, 4)), ((2, 3, 4, 5), (60, 1, 15, 3)), ((), ())):
            self.assertTrue(layout.is_dense(shape, stride))
            self.assertEqual(layout.packed_stride(shape, stride), stride)

    def test_span_reaches_the_last_element(self) -> None:
        rng = random.Random(6)
        for _ in range(2000):
            view = random_view(rng)
            reached = [at - view.start for _, at in element_bytes(view)]
            wanted = max(reached) // view.itemsize + 1 if reached else 0
            self.assertEqual(layout.span(view.shape, view.stride), wanted)
            self.assertEqual(layout.numel(view.shape), len(reached))

    def test_dense_means_no_gap(self) -> None:
        rng = random.Random(7)
        for _ in range(2000):
            view = random_view(rng)
            if 0 in view.shape or layout.is_dense(view.shape, view.stride) is False:
                continue
            self.assertEqual(len(bytes_of(view)), layout.span(view.shape, view.stride) * view.itemsize)


class Sharing(unittest.TestCase):
    """Views that are said to be apart are apart; and blocks of one buffer that are apart are said to be."""

    def test_never_apart_with_a_byte_in_common(self) -> None:
        rng = random.Random(10)
        apart = 0
        for _ in range(5000):
            a, b = random_view(rng, storages=1, room=60), random_view(rng, storages=1, room=60)
            if not layout.may_share(a, b):
                apart += 1
                self.assertFalse(bytes_of(a) & bytes_of(b), (a, b))
            self.assertEqual(layout.may_share(a, b), layout.may_share(b, a))
        self.assertGreater(apart, 500)

    def test_what_is_exact(self) -> None:
        def block(rows: slice, columns: slice, of: int = 12, lines: int = 6) -> layout.View:
            r, c = range(lines)[rows], range(of)[columns]
            return View("s", 4 * (r.start * of + c.start), 4, (len(r), len(c)), (of * r.step, c.step))

        blocks = [
            block(rows, columns)
            for rows in (slice(None), slice(0, 3), slice(3, 6), slice(0, 6, 2), slice(1, 6, 2))
            for columns in (slice(0, 4), slice(4, 8), slice(8, 12), slice(2, 6), slice(0, 12, 2), slice(1, 12, 2))
        ]
        for a, b in itertools.product(blocks, blocks):
            spans = [(v.start, v.start + 4 * layout.span(v.shape, v.stride)) for v in (a, b)]
            if spans[0][0] < spans[1][1] and spans[1][0] < spans[0][1]:
                self.assertEqual(layout.may_share(a, b), bool(bytes_of(a) & bytes_of(b)), (a, b))


class Flat(unittest.TestCase):
    """Pieces partition any range, in order, and each lies inside of its extent or region."""

    def spaces(self) -> list[tuple[layout.FlatSpace, random.Random]]:
        rng = random.Random(8)
        out = []
        for _ in range(150):
            sizes = [rng.choice((0, 1, 2, 7, 30)) for _ in range(rng.randrange(8))]
            out.append((layout.FlatSpace(sizes, rng.randint(0, len(sizes))), rng))
        return out

    def test_pieces(self) -> None:
        for space, rng in self.spaces():
            self.assertEqual(space.total, sum(space.sizes))
            for _ in range(20):
                start, end = sorted((rng.randint(0, space.total), rng.randint(0, space.total)))
                at, last = start, -1
                for extent, low, high in space.pieces(start, end):
                    self.assertGreater(extent, last)
                    self.assertTrue(0 <= low < high <= space.extents[extent])
                    self.assertEqual(space.starts[extent] + low, at)
                    at, last = at + high - low, extent
                self.assertEqual(at, end)

    def test_small_pieces(self) -> None:
        for space, rng in self.spaces():
            total = sum(space.sizes[space.large :])
            for _ in range(20):
                start, end = sorted((rng.randint(0, total), rng.randint(0, total)))
                at, last = start, space.large - 1
                for region, low, high in space.small_pieces(start, end):
                    self.assertGreater(region, last)
                    self.assertTrue(0 <= low < high <= space.sizes[region])
                    self.assertEqual(space.small_starts[region - space.large] + low, at)
                    at, last = at + high - low, region
                self.assertEqual(at, end)

    def test_an_empty_range_has_no_piece(self) -> None:
        space = layout.FlatSpace([3, 4, 5], 1)
        for at in range(space.total + 1):
            self.assertEqual(list(space.pieces(at, at)), [])
        self.assertEqual(list(layout.FlatSpace([], 0).pieces(0, 0)), [])


class Cut(unittest.TestCase):
    """The ends of chunks rise strictly, cover everything, and are as many as was asked for."""

    def totals(self) -> list[int]:
        rng = random.Random(9)
        return [0, 1, 2, 1 << 20, (1 << 20) + 1, (64 << 20) + 1, 1 << 40, *(rng.randrange(1 << 36) for _ in range(200))]

    def test_a_number_of_chunks(self) -> None:
        for total in self.totals():
            for num_chunks in (1, 2, 3, 8, 64, 1000):
                ends = layout.cut(total, num_chunks)
                self.assertEqual(len(ends), min(num_chunks, total))
                self.check(total, ends)
                sizes = [end - start for start, end in zip([0, *ends], ends)]
                self.assertLessEqual(max(sizes, default=0) - min(sizes, default=0), 1)

    def test_as_many_as_serve_well(self) -> None:
        for total in self.totals():
            ends = layout.cut(total, None)
            self.check(total, ends)
            sizes = [end - start for start, end in zip([0, *ends], ends)]
            self.assertLessEqual(max(sizes, default=0), layout.MAX_CHUNK_BYTES)
            if total > layout.MIN_CHUNK_BYTES:
                self.assertGreaterEqual(min(sizes), layout.MIN_CHUNK_BYTES // 2)
            if total >= layout.MIN_CHUNK_BYTES * layout.CHUNKS_WANTED:
                self.assertGreaterEqual(len(ends), layout.CHUNKS_WANTED)

    def check(self, total: int, ends: list[int]) -> None:
        self.assertEqual(ends, sorted(set(ends)))
        self.assertEqual(ends[-1] if ends else 0, total)
        self.assertTrue(all(end > 0 for end in ends))
