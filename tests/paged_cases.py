"""Caches, tokens and slots for the tests of pages, shared by test_paged, test_paged_arguments and sanitize."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st
from ml_dtypes import float8_e4m3fn

from cuattn.testing import place
from cuattn.testing.cases import LAYOUTS
from cuattn.testing.profiles import as_dtype

FLOAT8 = np.dtype(float8_e4m3fn)
DTYPES = ("float16", "bfloat16", "float32")
PAGE_SIZES = (1, 5, 16, 17, 64, 256)  # one token, odd, the usual ones, above one block of threads
# Words of 16, 4 and 2 bytes; with and without whole vectors; K and V of one width and of two.
WIDTHS = ((64, 64), (128, 64), (8, 12), (10, 10), (5, 5), (1, 3), (80, 112), (192, 128))


@dataclass(frozen=True)
class PagedCase:
    """A cache, tokens for it and slots for them, every one at most once and some of them negative."""

    dtype: str = "float16"
    float8: bool = False
    num_pages: int = 5
    page_size: int = 5
    heads: int = 2
    widths: tuple[int, int] = (8, 8)
    num_tokens: int = 7
    layout: str = "contiguous"
    index: str = "int64"
    seed: int = 0

    @property
    def stored(self) -> np.dtype:
        return FLOAT8 if self.float8 else as_dtype(self.dtype)

    def rng(self, what: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, what])

    def page_shapes(self) -> list[tuple[int, ...]]:
        return [(self.num_pages, self.page_size, self.heads, width) for width in self.widths]

    def values(self, shape: tuple[int, ...], what: int) -> np.ndarray:
        return (8 * self.rng(what).standard_normal(shape)).astype(np.float32)

    def tokens(self) -> list[np.ndarray]:
        """K and V, (num_tokens, heads, width), in the layout of the case."""
        shapes = [(self.num_tokens, self.heads, width) for width in self.widths]
        return [place(self.values(shape, n).astype(as_dtype(self.dtype)), self.layout) for n, shape in enumerate(shapes)]

    def pages(self) -> list[np.ndarray]:
        """Pages with something everywhere, in the layout of the case, among NaN."""
        return [place(self.values(s, 2 + n).astype(self.stored), self.layout) for n, s in enumerate(self.page_shapes())]

    def strided(self, ids: np.ndarray) -> np.ndarray:
        return np.repeat(ids.astype(self.index), 3)[::3]

    def slots(self) -> np.ndarray:
        slots = self.rng(4).permutation(self.num_pages * self.page_size)[: self.num_tokens]
        slots = np.concatenate([slots, np.full(self.num_tokens - len(slots), -1)])
        return self.strided(np.where(self.rng(5).random(self.num_tokens) < 0.2, -1 - abs(slots), slots))

    def scales(self) -> dict:
        """By turns: none, one for all on the host, an array of one, one for each head."""
        kinds = [{}, {"k_scale": 0.37, "v_scale": 2}, {"k_scale": self.scale(1)}, {"k_scale": self.scale(), "v_scale": self.scale()}]
        return kinds[self.seed % 4] if self.float8 else {}

    def scale(self, heads: int | None = None) -> np.ndarray:
        return np.repeat(np.exp(self.values((heads or self.heads,), 6) / 8), 2)[::2]


@st.composite
def cases(draw: st.DrawFn, float8: bool | None = None) -> PagedCase:
    return PagedCase(
        draw(st.sampled_from(DTYPES)), draw(st.booleans()) if float8 is None else float8,
        draw(st.integers(1, 6)), draw(st.sampled_from(PAGE_SIZES)), draw(st.sampled_from([1, 2, 3, 8])),
        draw(st.sampled_from(WIDTHS)), draw(st.integers(0, 40)), draw(st.sampled_from(LAYOUTS)),
        draw(st.sampled_from(["int32", "int64"])), draw(st.integers(0, 2**32 - 1)),
    )  # fmt: skip


def host(backend, array) -> np.ndarray:
    """As bits on the way, for CuPy has no kernels for float8."""
    return backend.host(array.view(f"u{array.dtype.itemsize}")).view(array.dtype)


def guarded_pages(backend, case: PagedCase) -> list[tuple]:
    """Of K and of V: the memory around the pages, and pages in which every byte is 255."""
    return [backend.guarded(shape, case.stored, case.layout) for shape in case.page_shapes()]


def full(case: PagedCase) -> list[np.ndarray]:
    """What `guarded_pages` hold."""
    item = case.stored.itemsize
    return [np.full(int(np.prod(s)) * item, 0xFF, np.uint8).view(case.stored).reshape(s) for s in case.page_shapes()]
