"""What pages, rotary embedding and decode refuse in the float64 reference; nothing is written before."""

import re

import numpy as np
import pytest

from cuattn import reference
from tests.reference_laws import floating_point_errors_raise

__all__ = ["floating_point_errors_raise"]  # for every test here

COPY, ROTATE, CHOSEN = "copy_pages_between", "apply_rotary", "cache_batch_idx"
T, P, K, V = np.zeros((3, 2, 8)), np.zeros((3, 2, 4)), np.zeros((6, 5, 2, 8)), np.zeros((6, 5, 2, 4))
Q, NEW, HALF, COS = np.zeros((2, 1, 4, 8)), np.zeros((2, 3, 2, 8)), K.astype(np.float16), np.zeros((9, 4))
TABLE, KV = np.array([[0, 1], [2, -1]]), {"k": NEW, "v": NEW[..., :4]}
CACHE, ANGLES = (K, V, TABLE, [7, 5]), {"rotary_cos": COS, "rotary_sin": COS}
REFUSED = [
    ("append_kv", (T, P, K[0], V, [0]), {}, "k_pages must have 4 dimensions; got 3"),
    ("append_kv", (T, P, K, V[:5], [0]), {}, "v_pages.shape[:3] must be (6, 5, 2); got (5, 5, 2)"),
    ("append_kv", (T, P, K[:, :0], V[:, :0], [0]), {}, "k_pages.shape[1] must be at least 1; got 0"),
    ("append_kv", (T, P, K, V, [0, 1]), {}, "k.shape must be (2, 2, 8); got (3, 2, 8)"),
    ("append_kv", (T, T, K, V, [0, 1, 2]), {}, "v.shape must be (3, 2, 4); got (3, 2, 8)"),
    ("append_kv", (T, P, K, V, [0, 30, -1]), {},
     "slot_mapping must be below num_pages * page_size (30); got 30"),
    ("append_kv", (T, P, K, V, [0.0, 1, 2]), {}, "slot_mapping must hold integers; got float64"),
    ("append_kv", (T, P, K, V, [[0, 1, 2]]), {}, "slot_mapping must have 1 dimensions; got 2"),
    ("append_kv", (T, P, K, V, [0, 1, 2]), {"v_scale": [1]}, "v_scale.shape must be () or (2,); got (1,)"),
    ("gather_kv", (K, V, [44]), {}, "slot_mapping must be below num_pages * page_size (30); got 44"),
    ("gather_kv", (K, V, [0]), {"k_scale": [1] * 3}, "k_scale.shape must be () or (2,); got (3,)"),
    ("gather_sequence", (K, [0, 1], 11), {}, "length must be within 0 and 10; got 11"),
    ("gather_sequence", (K, [0, 1], -1), {}, "length must be within 0 and 10; got -1"),
    ("gather_sequence", (K, [0, -1], 6), {}, "block_table_row[1] must be within 0 and 5; got -1"),
    ("gather_sequence", (K, [6], 1), {}, "block_table_row[0] must be within 0 and 5; got 6"),
    (COPY, (K, V, K, V, [0], [6]), {}, "target must be below num_pages of dst_k (6); got 6"),
    (COPY, (K, V, K[:1], V[:1], [9], [0]), {}, "source must be below num_pages of src_k (6); got 9"),
    (COPY, (K, V, V, V, [0], [0]), {}, "dst_k.shape[1:] must equal src_k.shape[1:] (5, 2, 8); got (5, 2, 4)"),
    (COPY, (K, V, K, K, [0], [0]), {}, "dst_v.shape[1:] must equal src_v.shape[1:] (5, 2, 4); got (5, 2, 8)"),
    (COPY, (K, V, HALF, V, [0], [0]), {}, "dst_k.dtype must equal src_k.dtype float64; got float16"),
    (COPY, (V, K, V, HALF, [0], [0]), {}, "dst_v.dtype must equal src_v.dtype float64; got float16"),
    (COPY, (K, V, K, V, [0, 1], [2]), {}, "target.shape must equal source.shape (2,); got (1,)"),
    ("slots", (TABLE, [0], 1, 5), {}, "cache_seqlens.shape must be (2,); got (1,)"),
    ("slots", (TABLE, [0, -1], 1, 5), {}, "cache_seqlens must be at least 0; got -1"),
    ("slots", (TABLE, [0, 1], 1, 0), {}, "page_size must be at least 1; got 0"),
    (ROTATE, (T[0, 0], COS, COS, 0), {}, "x must have at least 2 dimensions; got 1"),
    (ROTATE, (T, COS[0], COS, [0] * 3), {}, "cos must have 2 dimensions; got 1"),
    (ROTATE, (T, COS, COS[:5], [0] * 3), {}, "sin.shape must equal cos.shape (9, 4); got (5, 4)"),
    (ROTATE, (P, COS, COS, [0] * 3), {}, "cos.shape[1] must be at most half of head_dim (4); got 4"),
    (ROTATE, (T, COS, COS, [0.0] * 3), {}, "positions must hold integers; got float64"),
    (ROTATE, (T, COS, COS, [0]), {}, "positions.shape must equal x.shape[:-2] (3,); got (1,)"),
    (ROTATE, (T, COS, COS, [0, 9, 0]), {}, "positions must be 0 or more and below cos.shape[0] (9); got 9"),
    (ROTATE, (T, COS, COS, [0, -1, 0]), {}, "positions must be 0 or more and below cos.shape[0] (9); got -1"),
    ("decode", (Q[0], *CACHE), {}, "q must have 4 dimensions; got 3"),
    ("decode", (Q[..., :4], *CACHE), {}, "k_pages.shape[3] must be 4; got 8"),
    ("decode", (Q[:, :, :3], *CACHE), {}, "q.shape[2] must be a multiple of num_kv_heads of k (2); got 3"),
    ("decode", (Q, K, V, TABLE[:1], [7, 5]), {}, "block_table.shape[0] must be 2; got 1"),
    ("decode", (Q, K, V, TABLE / 1, [7, 5]), {}, "block_table must hold integers; got float64"),
    ("decode", (Q, K, V, TABLE, [7]), {}, "cache_seqlens.shape[0] must be 2; got 1"),
    ("decode", (Q, K, V, TABLE, [11, 5]), {},
     "cache_seqlens must be within 0 and max_pages_per_seq * page_size - seqlen_new (10); got 11"),
    ("decode", (Q, K, V, TABLE, [8, 5]), KV,
     "cache_seqlens must be within 0 and max_pages_per_seq * page_size - seqlen_new (7); got 8"),
    ("decode", (Q, K, V, TABLE, [-1, 5]), {},
     "cache_seqlens must be within 0 and max_pages_per_seq * page_size - seqlen_new (10); got -1"),
    ("decode", (Q, *CACHE), {"k": NEW}, "k and v must be given together; got one"),
    ("decode", (Q, *CACHE), KV | {"k": NEW[:1]}, "k.shape must be (2, 3, 2, 8); got (1, 3, 2, 8)"),
    ("decode", (Q, *CACHE), KV | {"v": NEW}, "v.shape must be (2, 3, 2, 4); got (2, 3, 2, 8)"),
    ("decode", (Q, *CACHE), KV, "block_table[1, 1] must be within 0 and num_pages - 1 (5); got -1"),
    ("decode", (Q, K[:1], V[:1], *CACHE[2:]), {},
     "block_table[0, 1] must be within 0 and num_pages - 1 (0); got 1"),
    ("decode", (Q, K, V, [[0, 1], [-1, 2]], [4, 4]), KV | {"window": (0, 0)},  # written, although unseen
     "block_table[1, 0] must be within 0 and num_pages - 1 (5); got -1"),
    ("decode", (Q, *CACHE), {"cache_leftpad": [0, 6]},
     "cache_leftpad must be within 0 and cache_seqlens (5); got 6"),
    ("decode", (Q, *CACHE), {"cache_leftpad": [0]}, "cache_leftpad.shape must be (2,); got (1,)"),
    ("decode", (Q, *CACHE), {CHOSEN: [0, 2]},
     "cache_batch_idx must be within 0 and num_sequences - 1 (1); got 2"),
    ("decode", (Q, *CACHE), {CHOSEN: [0, -1]},
     "cache_batch_idx must be within 0 and num_sequences - 1 (1); got -1"),
    ("decode", (Q, *CACHE), KV | {"rotary_cos": COS},
     "rotary_cos and rotary_sin must be given together; got one"),
    ("decode", (Q, *CACHE), ANGLES, "rotary_cos must come with new k and v; got none"),
    ("decode", (Q, *CACHE), KV | ANGLES,
     "positions must be 0 or more and below rotary_cos.shape[0] (9); got 9"),
    ("decode", (Q, *CACHE), KV | ANGLES | {"rotary_cos": COS[0]}, "rotary_cos must have 2 dimensions; got 1"),
    ("decode", (Q, *CACHE), {"window": (-2, 0)},
     "window must be (left, right), each -1 or more; got (-2, 0)"),
    ("decode", (Q, *CACHE), KV | {"v_scale": [1]}, "v_scale.shape must be () or (2,); got (1,)"),
    ("decode", (Q, *CACHE), {"alibi_slopes": [1, 1]}, "alibi_slopes.shape must be (4,) or (2, 4); got (2,)"),
]  # fmt: skip


@pytest.mark.parametrize(("function", "arguments", "options", "message"), REFUSED)
def test_refusals_name_the_value_and_change_nothing(function, arguments, options, message):
    arguments = [np.array(x) for x in arguments]
    pages = [x for x in arguments if x.ndim == 4]
    for x in pages:
        x.fill(np.nan)
    error = TypeError if "integers" in message else ValueError
    with pytest.raises(error, match=f"^{re.escape(f'reference.{function}: {message}')}$"):
        getattr(reference, function)(*arguments, **options)
    assert all(np.isnan(x).all() for x in pages)
