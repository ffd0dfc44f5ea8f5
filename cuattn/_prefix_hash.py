"""Names for full pages: a chained sha256, so that equal names mean equal tokens from the very first one on.

A page's name covers its own token ids, all those before it, the page size and a *salt*: whatever else keys
and values depend on (a LoRA adapter, a tenant, the pictures in a prompt). Everything that is hashed carries
its type and its length, so no two different inputs give the same bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

Salt = bool | int | str | bytes | tuple["Salt", ...] | None


def root(salt: Salt, page_size: int) -> bytes:
    """The name of the empty prefix.

    Parameters
    ----------
    salt : None, bool, int, str, bytes or a tuple of these
        Such as ``("lora", "X")`` or ``(("lora", "X"), ("cache_salt", "Y"))``. Different types, kinds, orders
        and nestings are different salts.
    page_size : int
        Tokens in a page.

    Returns
    -------
    bytes
        32 bytes.

    Raises
    ------
    TypeError
        If `salt` contains anything else.
    """
    return hashlib.sha256(b"cuattn root\0" + _encoded((page_size, salt))).digest()


def extend(parent: bytes, tokens: Sequence[int] | np.ndarray) -> bytes:
    """The name of a prefix that is one full page longer.

    Parameters
    ----------
    parent : bytes
        The name of the prefix before this page.
    tokens : sequence of int or array, (page_size,)
        The page's token ids; they are hashed as little-endian int64.

    Returns
    -------
    bytes
        32 bytes.
    """
    return hashlib.sha256(b"cuattn page\0" + parent + np.asarray(tokens, "<i8").tobytes()).digest()


def _encoded(value: Salt) -> bytes:
    """Type, length and contents; no value's bytes are the beginning of another's."""
    kind: bytes
    if value is None:
        kind, length, contents = b"n", 0, b""
    elif isinstance(value, bool):
        kind, length, contents = b"?", 1, bytes([value])
    elif isinstance(value, int):
        contents = str(value).encode()
        kind, length = b"i", len(contents)
    elif isinstance(value, str):
        contents = value.encode("utf-8", "surrogatepass")
        kind, length = b"s", len(contents)
    elif isinstance(value, bytes):
        kind, length, contents = b"b", len(value), value
    elif isinstance(value, tuple):
        kind, length, contents = b"t", len(value), b"".join(map(_encoded, value))
    else:
        rule = "must be None, bool, int, str, bytes or a tuple of these"
        raise TypeError(f"PagedKVCache: salt {rule}; got {type(value).__name__}")
    return kind + length.to_bytes(8, "little") + contents
