"""The laws of merging, as a suite for any merge ``(out_a, lse_a, out_b, lse_b) -> (out, lse)``.

All at once, or one test for each::

    def test_my_merge():
        check_merge(my_merge, dtypes=["float32"])

    @pytest.mark.parametrize("law", MergeLaws.names())
    def test_my_merge(law):
        MergeLaws(my_merge, dtypes=["float32"]).check(law)

A failure names law and case; ``MergeLaws(my_merge).identity(StateCase(...))`` runs one law on one case.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cuattn.testing.cases import StateCase, to_device
from cuattn.testing.compare import assert_same_bits, assert_state, to_host
from cuattn.testing.profiles import DTYPES, PROFILES, as_dtype
from cuattn.testing.strategies import HEAD_DIMS, state_cases
from cuattn.testing.tolerance import fold_bound, merge_bound

import hypothesis  # isort: skip  (after strategies, which says what to install)

Part = tuple[Any, Any]
SHIFTS = (-5e5, -1e4, -100.5, 3.25, 1e4, 5e5)      # multiples of 1/8 below 2^20: added exactly in float32
LAWS: dict[str, tuple[int, int]] = {}              # name: least and largest number of states of a case


def _law(min_states: int, max_states: int) -> Callable:
    """Register a method as a law over cases with that many states; its failures name the law and the case."""
    def register(method: Callable[[MergeLaws, StateCase], None]) -> Callable[[MergeLaws, StateCase], None]:
        LAWS[method.__name__] = (min_states, max_states)

        @functools.wraps(method)
        def checked(self: MergeLaws, case: StateCase) -> None:
            self._running = method.__name__
            try:
                method(self, case)
            except AssertionError as error:
                raise AssertionError(f"law '{method.__name__}' is broken: {error}\n  {case!r}") from error
        return checked
    return register


class MergeLaws:
    """The laws of merging, each a method that takes a `StateCase`.

    Parameters
    ----------
    merge : callable
        ``merge(out_a, lse_a, out_b, lse_b) -> (out, lse)``; ``out (*rows, head_dim)`` of the dtype of the
        inputs, ``lse (*rows)`` float32, natural log. Rows are ``(tokens,)``, ``(tokens, heads)`` or ``(batch,
        tokens, heads)``.
    dtypes, profiles, layouts : sequence of str
        What to try. The default layout is contiguous; pass ``cuattn.testing.LAYOUTS`` if strides are
        honoured.
    head_dims : sequence of int, optional
        Default: anything from 1 to 512.
    max_rows : int, optional
        Largest product of the leading dimensions.
    xp : module, optional
        Library of the arrays that `merge` takes: ``numpy``, ``cupy``, or another with ``asarray``.
    bitwise_commutative : bool, optional
        Whether swapping the arguments must give the same bits, and not only the same result within the bound.
    flush_subnormals : bool, optional
        Whether the arithmetic flushes subnormals (XLA, ``-ftz=true``): the profile "tiny" is then left out.
    settings : hypothesis.settings, optional
        Default: 50 examples of each law, no deadline, no database.

    Attributes
    ----------
    ratios : dict of str to float
        The largest error / bound that each law with a bound has measured so far.

    """

    def __init__(self, merge: Callable[..., Part], *, dtypes: Sequence[str] = DTYPES, xp: Any = np,
                 settings: hypothesis.settings | None = None, bitwise_commutative: bool = False,
                 profiles: Sequence[str] = PROFILES, layouts: Sequence[str] = ("contiguous",),
                 head_dims: Sequence[int] | None = None, max_rows: int = 40,
                 flush_subnormals: bool = False) -> None:
        self.merge, self.xp = merge, xp
        self.bitwise_commutative, self.flush_subnormals = bitwise_commutative, flush_subnormals
        settings = settings or hypothesis.settings(max_examples=50, deadline=None, database=None)
        self.settings = hypothesis.settings(settings, report_multiple_bugs=False)       # one AssertionError
        self.head_dims = HEAD_DIMS if head_dims is None else tuple(head_dims)
        self.choices = {
            "dtypes": tuple(str(as_dtype(dtype)) for dtype in dtypes), "layouts": tuple(layouts),
            "profiles": tuple(p for p in profiles if not (flush_subnormals and p == "tiny"))}
        self.sizes = {"head_dims": head_dims, "max_rows": max_rows}
        self.ratios: dict[str, float] = {}
        self._running = ""                         # the law whose ratios are being kept

    @staticmethod
    def names() -> tuple[str, ...]:
        """Return the names of all laws."""
        return tuple(LAWS)

    def check(self, law: str) -> None:
        """Check one law on fixed edge cases, one at least for each profile, and on drawn cases.

        Raises
        ------
        AssertionError
            Naming the law and the case, which rebuilds itself from its ``repr``.

        """
        low, high = LAWS[law]
        method = getattr(self, law)

        def run(case: StateCase) -> None:
            method(case)
        for case in reversed(self._edges(high)):       # hypothesis begins with the last one added
            run = hypothesis.example(case=case)(run)
        cases = state_cases(min_states=low, max_states=high, **self.choices, **self.sizes)
        self.settings(hypothesis.given(case=cases)(run))()

    def _edges(self, num_states: int) -> list[StateCase]:
        """Return cases of each profile and dtype, layouts and head_dims in turn, and one without rows."""
        def turn(i: int, choices: Sequence[Any]) -> Any:
            return choices[i % len(choices)]
        dtypes, layouts, profiles = (self.choices[name] for name in ("dtypes", "layouts", "profiles"))
        edges = [
            StateCase((2, 3), num_states, turn(i, self.head_dims), dtype, profile, turn(i + j, layouts), i)
            for i, profile in enumerate(profiles) for j, dtype in enumerate(dtypes)]
        return [*edges, StateCase((0, 3), num_states, self.head_dims[0], dtypes[0], profiles[0], layouts[0])]

    # The laws, in the order in which check_merge runs them.

    @_law(2, 2)
    def inputs_unchanged(self, case: StateCase) -> None:
        """The inputs, and for NumPy the memory around them, are not written."""
        host = [x for part in case.parts() for x in part]
        memory = [x if x.base is None else x.base for x in host] if self.xp is np else host
        before = [x.copy() for x in memory]
        given = [to_device(x, self.xp) for x in host]
        self._call(given[:2], given[2:])
        names = ("out_a", "lse_a", "out_b", "lse_b")
        for name, old, new in zip(names, before, memory if self.xp is np else given, strict=True):
            assert_same_bits(to_host(new, name), old, name=f"{name} before and after the merge")

    @_law(2, 2)
    def oracle(self, case: StateCase) -> None:
        """The merge of two states is the float64 definition within the derived bound."""
        a, b = case.parts()
        bound = self._bound(a, b)                  # before the merge, which may break its inputs
        self._close(case, self._call(a, b), case.expected(), bound)

    @_law(1, 1)
    def identity(self, case: StateCase) -> None:
        """``x | empty`` and ``empty | x`` are x, bit for bit."""
        (x,) = _cleaned(case.parts())
        empty = np.zeros_like(x[0]), np.full_like(x[1], -np.inf)
        self._same(self._call(x, empty), x, "x | empty")
        self._same(self._call(empty, x), x, "empty | x")

    @_law(2, 2)
    def empty(self, case: StateCase) -> None:
        """``empty | empty`` is empty: out 0, lse -inf."""
        a, b = dataclasses.replace(case, profile="all empty").parts()
        self._close(case, self._call(a, b), (np.zeros(a[0].shape), np.full(a[1].shape, -np.inf)), (0.0, 0.0))

    @_law(2, 2)
    def commutativity(self, case: StateCase) -> None:
        """``a | b`` is ``b | a``: within the bound, or bit for bit if promised."""
        a, b = case.parts()
        bound = self._bound(a, b)
        left, right = self._call(a, b), self._call(b, a)
        if self.bitwise_commutative:
            self._same(left, right, "a | b and b | a")
        else:
            self._agree(case, left, right, bound, bound)

    @_law(3, 3)
    def associativity(self, case: StateCase) -> None:
        """``(a | b) | c`` is ``a | (b | c)`` within the bounds of both."""
        parts = case.parts()
        trees = ((0, 1), 2), (0, (1, 2))
        left, right = (self._fold(parts, tree) for tree in trees)
        self._agree(case, left, right, *(self._bound(*parts, tree=tree) for tree in trees))

    @_law(2, 7)
    def partition_invariance(self, case: StateCase) -> None:
        """Merging states two at a time in any order is the definition within the bound of that order."""
        parts, tree = case.parts(), random_tree(case.num_states, case.seed)
        bounds = self._bound(*parts, tree=tree)
        self._close(case, self._fold(parts, tree), case.expected(), bounds, f"tree {tree}")

    @_law(2, 2)
    def poison(self, case: StateCase) -> None:
        """What ``out`` holds in an empty state, NaN and inf included, changes no bit of the result."""
        case = dataclasses.replace(case, profile="empty holds poison")
        poisoned, zeroed = self._call(*case.parts()), self._call(*_cleaned(case.parts()))
        self._same(poisoned, zeroed, "with poison and with zeros")

    @_law(2, 2)
    def shift_covariance(self, case: StateCase) -> None:
        """Adding c to all lse, exactly, adds c to the merged lse and leaves out alone, within the bounds."""
        shift = np.float32(SHIFTS[case.seed % len(SHIFTS)])
        a, b = case.parts()
        for _, lse in (a, b):                      # multiples of 1/8, so that adding c is exact
            lse[...] = np.where(np.isneginf(lse), -np.inf, np.clip(np.round(lse * 8) / 8, -2.0**14, 2.0**14))
        there_a, there_b = ((out, lse + shift) for out, lse in (a, b))
        here, there = self._call(a, b), self._call(there_a, there_b)
        here = to_host(here[0], "out"), to_host(here[1], "lse").astype(np.float64) + float(shift)
        self._agree(case, there, here, self._bound(a, b), self._bound(there_a, there_b), f"shift {shift}")

    @_law(2, 2)
    def fully_written(self, case: StateCase) -> None:
        """Every element of the result is written: memory that held NaN, or ones, gives the same bits."""
        a, b = (tuple(to_device(x, self.xp) for x in part) for part in _cleaned(case.parts()))
        results = []
        for stale in (np.nan, 1.0):
            self._litter(case, stale)
            results.append(tuple(to_host(x).copy() for x in self._call(a, b)))
        self._same(*results, "on memory that held NaN and on memory that held 1")

    # How a law calls the merge and compares.

    def _call(self, a: Part, b: Part) -> Part:
        """Merge two states, given on either side; what the merge raises is a failure of the law."""
        arrays = [to_device(x, self.xp) if isinstance(x, np.ndarray) else x for x in (*a, *b)]
        try:
            result = self.merge(*arrays)
        except Exception as error:
            raise AssertionError(f"the merge raised {type(error).__name__}: {error}") from error
        if not isinstance(result, (tuple, list)) or len(result) != 2:
            raise AssertionError(f"the merge must return a pair (out, lse); got {type(result).__name__}")
        return tuple(result)

    def _fold(self, parts: Sequence[Part], tree: Any) -> Part:
        return self._call(*(self._fold(parts, t) for t in tree)) if isinstance(tree, tuple) else parts[tree]

    def _bound(self, *parts: Part, tree: Any = None) -> tuple[np.ndarray, np.ndarray]:
        outs, lses = (np.stack(x) for x in zip(*parts, strict=True))
        bound = merge_bound if tree is None else functools.partial(fold_bound, tree=tree)
        return bound(outs, lses, outs.dtype, flush_subnormals=self.flush_subnormals)

    def _close(self, case: StateCase, result: Part, expected: Part, bounds: Part,
               name: str = "a | b") -> None:
        ratios = assert_state(result, expected, bounds, dtype=case.dtype, name=name)
        self.ratios[self._running] = max(self.ratios.get(self._running, 0.0), *ratios)

    def _agree(self, case: StateCase, x: Part, y: Part, bound_x: Part, bound_y: Part,
               name: str = "a | b") -> None:
        expected = tuple(to_host(array).astype(np.float64) for array in y)
        self._close(case, x, expected, tuple(p + q for p, q in zip(bound_x, bound_y, strict=True)), name)

    def _same(self, x: Part, y: Part, name: str) -> None:
        for quantity, p, q in zip(("out", "lse"), x, y, strict=True):
            assert_same_bits(p, q, name=f"{quantity}, {name}")

    def _litter(self, case: StateCase, value: float) -> None:
        """Fill and free memory of the sizes of the result, which an allocator is likely to hand out next."""
        shapes = ((*case.rows, case.head_dim), as_dtype(case.dtype)), (case.rows, np.dtype(np.float32))
        kept = [to_device(np.full(shape, value, dtype), self.xp) for shape, dtype in shapes for _ in range(8)]
        kept.clear()


def check_merge(merge: Callable[..., Part], **options: Any) -> dict[str, float]:
    """Check a merge against every law; `options` are those of `MergeLaws`.

    Returns
    -------
    dict of str to float
        The largest error / bound of each law that has a bound, at most 1.

    Raises
    ------
    AssertionError
        At the first law that is broken, naming it and a case that breaks it.

    """
    laws = MergeLaws(merge, **options)
    for law in laws.names():
        laws.check(law)
    return laws.ratios


def random_tree(n: int, seed: int) -> Any:
    """Return an order of merging n >= 1 states two at a time: nested pairs of 0 to n - 1, permuted."""
    rng = np.random.default_rng(seed)
    nodes: list[Any] = rng.permutation(n).tolist()
    while len(nodes) > 1:
        i = rng.integers(len(nodes) - 1)
        nodes[i:i + 2] = [(nodes[i], nodes[i + 1])]
    return nodes[0]


def _cleaned(parts: Sequence[Part]) -> Sequence[Part]:
    """Zero the outputs of empty states, in place."""
    for out, lse in parts:
        out[np.isneginf(lse)] = 0
    return parts
