"""Random operations on a paged cache against a model that is a dictionary of token lists.

The model knows for each sequence what must be in its pages. Contents are written through `slot_mapping` some
time after the pages were handed out, copied and swapped by the cache, and gathered after every step: a page
that is used for two things at once shows as wrong contents. Where streams are late, writing, copying, swapping
and looking happen when their stream gets there, so what the cache leaves unordered shows too. A second model
follows the events and knows who should be evicted.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from functools import partial
from itertools import count

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cuattn import _prefix_hash
from cuattn.paged_cache import OutOfPages
from cuattn.testing import to_host
from tests.backends import Emulator
from tests.paged_contents import load, slots_of, small_cache, store, value
from tests.paged_model import Model
from tests.paged_places import LateStreams, Place
from tests.paged_swap_rules import SwapRules

SALTS = st.sampled_from([None, ("lora", "X"), ("cache_salt", "X")])
BITS = st.integers(0, 1)  # two ids, so that sequences often go on alike
TOKENS = st.builds(lambda n, tail: [0, 1, 1, 0, 0, 1, 0, 1, 1][:n] + tail, st.integers(0, 9), st.lists(BITS, max_size=2))
FEW = st.integers(0, 6)
_unknown = count(2**20)  # contents of tokens without ids, each another


class PagedCacheMachine(SwapRules, RuleBasedStateMachine):
    @staticmethod
    def place_of(seed) -> Place:
        return Place()

    @initialize(
        num_pages=st.integers(4, 14),
        page_size=st.integers(1, 4),
        num_host_pages=st.integers(0, 12),
        layers=st.integers(1, 2),
        seed=st.integers(0, 2**32 - 1),
    )
    def begin(self, num_pages, page_size, num_host_pages, layers, seed):
        self.place, self.in_use = self.place_of(seed), contextlib.ExitStack()
        self.in_use.enter_context(self.place.use())
        options = {"num_layers": layers, "num_host_pages": num_host_pages, "max_events": 10_000}
        self.cache, self.size = small_cache(num_pages, page_size, xp=self.place.xp, **options), page_size
        self.model: dict[object, Model] = {}
        self.orphans: list = []  # swaps whose sequence was freed
        self.names: dict[bytes, int] = {}  # from here on what the events say
        self.held: set[int] = set()
        self.cached: OrderedDict[int, None] = OrderedDict()
        self.add([0, 1, 1], None, True)

    # Rules

    @precondition(lambda self: len(self.model) < 6)
    @rule(tokens=TOKENS, salt=SALTS, ready=st.booleans())
    def add(self, tokens, salt, ready):
        seq_id, hits = self.unused(), self.found(tokens, salt)
        assert self.cache.match_prefix(tokens, salt) == hits
        name, cached = _prefix_hash.root(salt, self.size), 0
        for begin in range(0, hits, self.size):
            name = _prefix_hash.extend(name, tokens[begin : begin + self.size])
            cached += self.names[name] in self.cached
        needed, free = self.pages(len(tokens)) - hits // self.size, self.cache.num_free() - cached
        result = self.attempt(needed, free, lambda: self.cache.add_sequence(seq_id, tokens, salt=salt))
        if result is not None:
            assert result == hits
            contents = [value(salt, tokens[: i + 1]) for i in range(len(tokens))]
            self.model[seq_id] = Model(salt, list(tokens), contents, hits)
            if ready:
                self.write(seq_id, len(tokens))
                self.published(seq_id, len(tokens))

    @precondition(lambda self: self.of("device"))
    @rule(data=st.data(), tokens=st.lists(BITS, max_size=6), known=st.booleans(), fails=st.booleans())
    def grow(self, data, tokens, known, fails):
        seq_ids = st.lists(st.sampled_from(self.of("device")), min_size=1, max_size=3, unique=True)
        chosen = data.draw(seq_ids, "seq_ids")
        self.grow_by({seq_id: tokens[number:] for number, seq_id in enumerate(chosen)}, known, fails)

    def grow_by(self, new, known, fails):
        tables, holders = self.tables(), self.holders()
        needed, copies, left = 0, 0, dict(holders)
        for seq_id, tokens in new.items():
            length = len(self.model[seq_id].contents)
            needed += self.pages(length + len(tokens)) - self.pages(length)
            if tokens and length % self.size and left[tables[seq_id][-1]] > 1:
                left[tables[seq_id][-1]] -= 1
                copies += 1
        seq_id, tokens = next(iter(new.items()))
        call = {
            (True, True): lambda: self.cache.append(seq_id, tokens),
            (True, False): lambda: self.cache.extend(seq_id, len(tokens)),
            (False, True): lambda: self.cache.append_many(new),
            (False, False): lambda: self.cache.extend_many({s: len(t) for s, t in new.items()}),
        }[len(new) == 1, known]
        if copies and fails:
            self.fail_to_copy(call)
        pairs = self.attempt(needed + copies, self.cache.num_free(), call)
        if pairs is not None:
            after = self.tables()
            assert len(pairs) == copies
            assert all(holders[source] > 1 and target not in holders for source, target in pairs)
            changed = [(tables[s][-1], after[s][len(tables[s]) - 1]) for s in new if tables[s]]
            assert sorted(pairs) == sorted((a, b) for a, b in changed if a != b)
            for seq_id, tokens in new.items():
                self.grown(self.model[seq_id], tokens, known)

    def grown(self, seq, tokens, known):
        for token in tokens:
            if known and len(seq.tokens) == len(seq.contents):
                seq.tokens.append(token)
                seq.contents.append(value(seq.salt, seq.tokens))
            else:
                seq.contents.append(float(next(_unknown)))

    def fail_to_copy(self, call):
        """A call that has to copy pages, but can't."""

        def fail(pairs):
            raise ZeroDivisionError

        before = self.tables(), self.cache.num_free(), self.cache.stats()["copies"]
        copies, self.cache.copies = self.cache.copies, fail
        with pytest.raises((ZeroDivisionError, OutOfPages)):
            call()
        self.cache.copies = copies
        assert (self.tables(), self.cache.num_free(), self.cache.stats()["copies"]) == before
        self.bookkeeping_is_consistent()

    @precondition(lambda self: self.of("device"))
    @rule(data=st.data(), most=st.integers(1, 9))
    def compute(self, data, most):
        self.write(self.pick(data), most)

    def write(self, seq_id, most):
        seq = self.model[seq_id]
        pending = seq.contents[seq.computed :]
        table, slots = self.tables()[seq_id], to_host(self.cache.slot_mapping([seq_id], len(pending)))
        self.place.queue(partial(store, self.cache, pending[:most], slots[:most]))
        self.follow_events()
        final = {-1, *self.names.values()}
        positions = range(seq.computed, len(seq.contents))
        places = [(table[i // self.size], i % self.size) for i in positions]
        assert slots.tolist() == [-1 if page in final else page * self.size + i for page, i in places]
        seq.computed = min(seq.computed + most, len(seq.contents))

    @precondition(lambda self: self.of("device") and len(self.model) < 6)
    @rule(data=st.data())
    def fork(self, data):
        seq_id, new_id = self.pick(data), self.unused()
        self.cache.fork(seq_id, new_id)
        seq = self.model[seq_id]
        known = [*seq.tokens], [*seq.contents], seq.computed
        self.model[new_id] = Model(seq.salt, *known, seq.released, seq.shortest)

    @precondition(lambda self: self.of("device"))
    @rule(data=st.data(), less=FEW, other_end=st.lists(BITS, max_size=3))
    def truncate(self, data, less, other_end):
        seq = self.model[seq_id := self.pick(data)]
        length = max(len(seq.contents) - less, 0)
        if length < seq.shortest:
            with pytest.raises(ValueError, match=f"length must be at least {seq.shortest}, or pages"):
                self.cache.truncate(seq_id, length)
            length = seq.shortest
        self.cache.truncate(seq_id, length)
        del seq.contents[length:], seq.tokens[length:]
        seq.computed = min(seq.computed, length)
        if other_end:
            self.grow_by({seq_id: other_end}, known=True, fails=False)

    @precondition(lambda self: self.of("device"))
    @rule(data=st.data(), window=st.integers(-1, 5))
    def release_outside_window(self, data, window):
        seq = self.model[seq_id := self.pick(data)]
        behind = 0 if window == -1 else max(seq.computed - window, 0) // self.size
        released = self.cache.release_outside_window(seq_id, window, computed_length=seq.computed)
        assert released == max(behind - seq.released, 0)
        if released:
            seq.released, seq.shortest = behind, max(seq.shortest, behind * self.size + window)

    @precondition(lambda self: self.of("device"))
    @rule(data=st.data(), less=FEW)
    def publish(self, data, less):
        seq_id = self.pick(data)
        self.published(seq_id, max(self.model[seq_id].computed - less, 0))

    def published(self, seq_id, known):
        self.follow_events()
        seq = self.model[seq_id]
        before, table = set(self.names), self.tables()[seq_id]
        number = self.cache.publish(seq_id, known)
        self.follow_events()
        name = _prefix_hash.root(seq.salt, self.size)
        expected = set()
        for index in range(min(known, len(seq.tokens)) // self.size):
            name = _prefix_hash.extend(name, seq.tokens[index * self.size : (index + 1) * self.size])
            if index >= seq.released:
                expected.add(name)
                assert name in before or self.names[name] == table[index]
        assert set(self.names) == before | expected and number == len(expected - before)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def free(self, data):
        seq_id = data.draw(st.sampled_from(list(self.model)), "seq_id")
        self.cache.free(seq_id)
        seq = self.model.pop(seq_id)
        if seq.swap:
            self.orphans.append(seq.swap)

    # What holds after each of them

    @invariant()
    def bookkeeping_is_consistent(self):
        self.cache.check()
        self.follow_events()
        stats, total = self.cache.stats(), self.cache.stats()["total"]
        assert (stats["in_use"], stats["cached"]) == (len(self.held), len(self.cached))
        assert len(self.held) == len(self.holders())
        assert stats["free"] + stats["cached"] + stats["in_use"] == total
        assert self.cache.num_free() == total - len(self.held)
        assert stats["sequences"] == len(self.model)
        assert stats["tokens"] == sum(len(seq.contents) for seq in self.model.values())

    @invariant()
    def contents_are_right(self):
        slots, contents = [np.zeros(0, np.int64)], []
        for seq_id, table in self.tables().items():
            seq = self.model[seq_id]
            assert len(table) == self.pages(len(seq.contents))
            assert [page == -1 for page in table] == [index < seq.released for index in range(len(table))]
            known = slice(seq.released * self.size, seq.computed)
            slots.append(slots_of(self.cache, seq_id)[known])
            contents += seq.contents[known]
        self.place.queue(partial(self.look, np.concatenate(slots), contents))
        self.place.go_on()

    def look(self, slots, contents):
        assert load(self.cache, slots).tolist() == contents

    def teardown(self):
        if not hasattr(self, "cache"):
            return
        with self.in_use:
            self.place.finish()
            for seq_id in list(self.model):
                self.cache.free(seq_id)
            for swap in self.orphans + [seq.swap for seq in self.model.values() if seq.swap]:
                assert swap.done
                self.cache.swap_done(swap)
            self.cache.check()
            stats = self.cache.stats()
            assert (stats["in_use"], stats["host_free"], stats["swaps"]) == (0, stats["host_total"], 0)


class LatePagedCacheMachine(PagedCacheMachine):
    place_of = LateStreams


class EmulatedPagedCacheMachine(PagedCacheMachine):
    @staticmethod
    def place_of(seed):
        return Place(Emulator("shuffle" if seed % 2 else "forward"))


def settled(machine, examples, steps):
    case = machine.TestCase
    case.settings = settings(max_examples=examples, stateful_step_count=steps, deadline=None, derandomize=True)
    return case


TestPagedCache = settled(PagedCacheMachine, 200, 50)
TestPagedCacheOnLateStreams = settled(LatePagedCacheMachine, 200, 50)
TestPagedCacheEmulated = settled(EmulatedPagedCacheMachine, 20, 30)
