"""The part of the random operations on a paged cache that moves sequences to the host and back."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from cuattn.paged_cache import OutOfPages
from tests.paged_contents import state
from tests.paged_model import Expectations
from tests.paged_places import Place


class SwapRules(Expectations):
    place: Place

    def attempt(self, needed, free, call):
        """A call that needs pages: it must fail exactly if there are too few, and then change nothing."""
        before = state(self.cache)
        try:
            result = call()
        except OutOfPages as error:
            assert (error.needed, error.free) == (needed, free) and needed > free  # noqa: PT017
            assert state(self.cache) == before
            return None
        assert needed <= free
        return result

    @precondition(lambda self: self.of("device"))
    @rule(data=st.data(), aside=st.booleans(), at_once=st.booleans())
    def swap_out(self, data, aside, at_once):
        self.swap(self.pick(data), self.cache.stats()["host_free"], self.cache.swap_out, aside, at_once)

    @precondition(lambda self: self.of("host"))
    @rule(data=st.data(), aside=st.booleans(), at_once=st.booleans())
    def swap_in(self, data, aside, at_once):
        self.swap(self.pick(data, "host"), self.cache.num_free(), self.cache.swap_in, aside, at_once)

    @precondition(lambda self: self.of("device"))
    @rule(data=st.data(), aside=st.booleans(), later=st.booleans())
    def there_and_back(self, data, aside, later):
        seq_id = self.pick(data)
        self.swap(seq_id, self.cache.stats()["host_free"], self.cache.swap_out, aside, True)
        if self.model[seq_id].place == "host":
            self.swap(seq_id, self.cache.num_free(), self.cache.swap_in, not aside, not later)

    def swap(self, seq_id, free, call, aside, at_once):
        seq = self.model[seq_id]
        needed = self.pages(len(seq.contents)) - seq.released
        swap = self.attempt(needed, free, lambda: call(seq_id, stream=self.place.side if aside else None))
        if swap is not None:
            assert len(swap.pairs) == needed and swap.to_host == (seq.place == "device")
            seq.place, seq.swap = "moving", swap
            if at_once:
                self.done(seq, swap, True)

    @precondition(lambda self: self.orphans or self.of("moving"))
    @rule(data=st.data(), moved=st.sampled_from([True, True, True, False]))
    def swap_done(self, data, moved):
        swaps = [(self.model[seq_id], self.model[seq_id].swap) for seq_id in self.of("moving")]
        swaps += [(None, swap) for swap in self.orphans]
        seq, swap = swaps[data.draw(st.integers(0, len(swaps) - 1), "swap")]
        if seq is None:
            self.orphans.remove(swap)
        self.done(seq, swap, moved)

    def done(self, seq, swap, moved):
        self.cache.swap_done(swap, moved=moved)
        if seq is not None:
            seq.place, seq.swap = ("host" if swap.to_host == moved else "device"), None
