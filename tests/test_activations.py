"""Attention of real queries, keys and values: layer 15 of SmolLM2-135M-Instruct, its first kv head, 1024 tokens of Python's documentation.

``python -m cuattn activations --layers 15 --kv-heads 0 --dtype float16 --max-tokens 1024 --out tests/activations.npz``
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cuattn import reference
from cuattn.testing import assert_state
from tests import attention_cases


@pytest.fixture(scope="module")
def real() -> dict[str, np.ndarray]:
    with np.load(Path(__file__).parent / "activations.npz") as stored:
        return {name: stored[f"{name}_15"][None] for name in "qkv"}


def test_they_are_no_noise(real):
    """Heads look at the first token and at near ones; random keys of this size would spread over hundreds."""
    assert [x.shape for x in real.values()] == [(1, 1024, 3, 64), (1, 1024, 1, 64), (1, 1024, 1, 64)]
    whole = reference.attention(real["q"][:, -64:], real["k"], real["v"], causal=True)[1]
    first = reference.attention(real["q"][:, -64:], real["k"][:, :1], real["v"][:, :1])[1]
    near = reference.attention(real["q"][:, -64:], real["k"], real["v"], causal=True, window=(127, 0))[1]
    assert np.exp(np.logaddexp(first, near) - whole).mean() > 0.5  # these are 13 % of the keys


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("window", [(-1, -1), (100, 0)])
def test_attention(backend, real, dtype, window):
    given = {name: x.astype(dtype) for name, x in real.items()} | {"causal": True, "window": window}
    given["q"] = given["q"][:, -40:]
    expected = attention_cases.expected_of(given)
    state = attention_cases.run(backend, given)
    assert_state([backend.host(x) for x in state], expected, attention_cases.bounds(given, expected, dtype))
