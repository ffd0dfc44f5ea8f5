"""Names of full pages: equal exactly for equal tokens, salts and page sizes."""

from __future__ import annotations

import hashlib
from itertools import combinations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cuattn._prefix_hash import _encoded, extend, root

ATOMS = st.none() | st.booleans() | st.integers() | st.text(max_size=4) | st.binary(max_size=4)
SALTS = st.recursive(ATOMS, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=5)


def chain(tokens, page_size, salt=None):
    names = [root(salt, page_size)]
    for begin in range(0, len(tokens), page_size):
        names.append(extend(names[-1], tokens[begin : begin + page_size]))
    return names


def typed(salt):
    """Equality that tells True from 1."""
    return (type(salt), tuple(map(typed, salt)) if isinstance(salt, tuple) else salt)


def test_what_is_hashed():
    encoded = b"t" + (2).to_bytes(8, "little") + b"i" + (2).to_bytes(8, "little") + b"16" + b"n" + bytes(8)
    name = hashlib.sha256(b"cuattn root\0" + encoded).digest()
    assert root(None, 16) == name
    tokens = (1).to_bytes(8, "little") + (-2 % 2**64).to_bytes(8, "little")
    assert extend(name, [1, -2]) == hashlib.sha256(b"cuattn page\0" + name + tokens).digest()


@given(
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=6, max_size=6),
    st.integers(0, 5),
    st.integers(1, 2**64),
)
def test_a_token_changes_the_names_of_its_page_and_of_all_later_ones(tokens, place, change):
    changed = list(tokens)
    changed[place] = (changed[place] + change + 2**63) % 2**64 - 2**63
    same = [a == b for a, b in zip(chain(tokens, 2), chain(changed, 2))]
    assert same == ([True] * 4 if changed == tokens else [i <= place // 2 for i in range(4)])


def test_tokens_that_python_hashes_alike():
    """Hugging Face's compute_hash takes hash() of a tuple, where -1 and -2 collide."""
    assert hash((0, (-1,))) == hash((0, (-2,)))
    assert extend(root(None, 1), [-1]) != extend(root(None, 1), [-2])


def test_the_same_tokens_in_pages_of_another_size():
    """kvcached #446: the page size of a hash was lost."""
    assert chain([1, 2, 3, 4], 2)[-1] != chain([1, 2, 3, 4], 4)[-1]
    assert root(None, 2) != root(None, 4)


def test_the_order_of_pages_counts():
    assert chain([1, 2, 3, 4], 2)[-1] != chain([3, 4, 1, 2], 2)[-1]


SIMILAR = [
    None, "", b"", (), 0, False, "0", b"0", True, 1, "1", "X", b"X", ("X",), (("X",),), ("lora", "X"),
    ("cache_salt", "X"), ("lor", "aX"), ("loraX",), "loraX", ("lora", "X", ""), ("lora", ("X",)),
    (("lora", "X"),), (("lora", "X"), ("cache_salt", "Y")), (("lora", "Y"), ("cache_salt", "X")),
    (("cache_salt", "Y"), ("lora", "X")), ("lora", "X", "cache_salt", "Y"), (None,), (None, None), (0,),
    ("lora", 1), ("lora", "1"), -1, 10, (1, 0), (10,),
]  # fmt: skip


def test_kinds_of_salt_are_told_apart():
    """vLLM #44701: an adapter "X" and a cache_salt "X" shared pages; vLLM #3263, #8240: no adapter in it."""
    for a, b in combinations(SIMILAR, 2):
        assert root(a, 16) != root(b, 16), (a, b)


@given(SALTS, SALTS)
@example(("a", "b"), ("ab",))
@example((1, 2), (12,))
@example(("a", ("b",)), ("a", "b"))
def test_no_salt_encodes_as_another_or_as_its_beginning(a, b):
    if typed(a) != typed(b):
        assert not _encoded(a).startswith(_encoded(b))
    assert (root(a, 4) == root(b, 4)) == (typed(a) == typed(b))


@pytest.mark.parametrize("kind", [list, tuple, np.int32, np.uint16, ">i8", "<i8"])
def test_the_container_of_the_tokens_does_not_matter(kind):
    tokens = kind([5, 6, 7]) if kind in (list, tuple) else np.array([5, 6, 7], kind)
    assert extend(b"parent", tokens) == extend(b"parent", [5, 6, 7])


@pytest.mark.parametrize("salt", [["lora", "X"], 1.5, {"lora": "X"}, ("lora", ["X"]), np.int64(1)])
def test_salts_of_other_types_are_refused(salt):
    with pytest.raises(
        TypeError, match=r"PagedKVCache: salt must be None, bool, int, str, bytes or a tuple of these; got"
    ):
        root(salt, 16)
