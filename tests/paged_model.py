"""A model of a paged cache that is a dictionary of token lists, and what follows from it."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field

from hypothesis import strategies as st

from cuattn import _prefix_hash
from cuattn.paged_cache import PagedKVCache

IDS = [0, "0", (0,), None, frozenset([1])]  # any hashable


@dataclass
class Model:
    """What a sequence is, in plain lists."""

    salt: object
    tokens: list  # ids, as long as they are known without a gap
    contents: list  # of every token
    computed: int  # leading tokens whose contents are written
    released: int = 0  # leading pages that are gone
    shortest: int = 0
    place: str = "device"
    swap: object = field(default=None, repr=False)


class Expectations:
    """What the model and the names that the events gave to pages say about `cache`."""

    cache: PagedKVCache
    size: int  # of a page
    model: dict[object, Model]
    orphans: list  # swaps whose sequence was freed
    names: dict[bytes, int]  # of published pages; from here on what the events say
    held: set[int]
    cached: OrderedDict[int, None]

    def pages(self, length):
        return -(-length // self.size)

    def of(self, place):
        return [seq_id for seq_id, seq in self.model.items() if seq.place == place]

    def pick(self, data, place="device"):
        return data.draw(st.sampled_from(self.of(place)), "seq_id")

    def unused(self):
        return next((seq_id for seq_id in IDS if seq_id not in self.model), len(self.model))

    def tables(self):
        return {seq_id: self.cache.block_table([seq_id])[0].tolist() for seq_id in self.of("device")}

    def holders(self):
        """Page -> how many hold it."""
        moving = [seq.swap for seq in self.model.values() if seq.swap] + self.orphans
        pages = [pair[0 if swap.to_host else 1] for swap in moving for pair in swap.pairs]
        return Counter(page for table in self.tables().values() for page in table if page >= 0) + Counter(
            pages
        )

    def found(self, tokens, salt):
        """Leading tokens of a prompt in published pages."""
        name, hits = _prefix_hash.root(salt, self.size), 0
        while hits + self.size < len(tokens):
            name = _prefix_hash.extend(name, tokens[hits : hits + self.size])
            if name not in self.names:
                break
            hits += self.size
        return hits

    def follow_events(self):
        for event in self.cache.take_events():
            if event.kind == "allocated":
                assert (event.digest is not None) == (event.page in self.cached)
                assert event.page not in self.held
                self.cached.pop(event.page, None)
                self.held.add(event.page)
            elif event.kind == "freed":
                self.held.remove(event.page)
                if event.page in self.names.values():
                    self.cached[event.page] = None
            elif event.kind == "published":
                assert event.page in self.held and event.digest not in self.names
                self.names[event.digest] = event.page
            elif event.kind == "evicted":
                assert self.names.pop(event.digest) == event.page
                if event.page not in self.held:
                    assert event.page == next(iter(self.cached)), "the one without a holder for longest goes first"
                    del self.cached[event.page]
            else:
                assert {event.page, event.source} <= self.held
