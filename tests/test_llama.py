"""A Llama model on cuattn against an independent float64 model, and the ways to run it against each other."""

from __future__ import annotations

import numpy as np
import pytest

from cuattn._gguf import read
from cuattn.llama import Engine, Llama, ModelError, Request, Sampling
from tests import llama_model
from tests.backends import Backend
from tests.llama_model import FLOAT32, SMALL, Sizes

PREFIX = [261, 114, 262, 259, 117, 104, 35, 21, 7, 90, 12, 200, 33]
STEPS = 64
PROMPTS = [PREFIX, [*PREFIX, 40, 41], [77], [*PREFIX[:9], 5, 6, 7, 8], [*PREFIX, 40, 41, 42]]


class Case:
    """A model, its tensors for the independent one, and the place where it runs."""

    def __init__(self, folder, place: Backend, sizes: Sizes = SMALL, **options) -> None:
        self.sizes, dtype = sizes, options.pop("dtype", None)
        self.tensors = llama_model.write(folder / "model.gguf", sizes, **options)
        self.model = Llama(read(folder / "model.gguf"), place.xp, dtype)
        self.host, self.exact = place.host, self.model.dtype == np.float32

    def expected(self, tokens: list[int]) -> tuple[np.ndarray, np.ndarray]:
        return llama_model.logits(self.tensors, tokens, self.sizes, self.model.dtype)

    def check(self, plain: list[list[int]], *requests: Request) -> None:
        """Each token is the likeliest one: in float32 without a doubt, in float16 as far as rounding lets one say."""
        for request in requests:
            if self.exact:
                assert request.generated == plain[PROMPTS.index(request.tokens[: request.prompt_length])][: request.max_tokens]
            else:
                expected, bound = (x[request.prompt_length - 1 : -1] for x in self.expected(request.tokens))
                chosen = np.take_along_axis(expected, np.array(request.generated)[:, None], 1)
                assert len(chosen) == request.max_tokens and (chosen >= expected.max(1, keepdims=True) - 2 * bound).all()


def finish(engine: Engine, *requests: Request) -> list[list[int]]:
    while not all(request.done for request in requests):
        engine.step()
        engine.cache.check()
    assert engine.active == 0 and engine.cache.stats()["in_use"] == 0
    return [request.generated for request in requests]


@pytest.fixture
def case(backend, tmp_path) -> Case:
    return Case(tmp_path, backend)


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> list[list[int]]:
    """The likeliest tokens after each prompt by the independent model alone; float32 leaves no doubt about any of them."""
    tensors = llama_model.write(tmp_path_factory.mktemp("plain") / "model.gguf")
    found = []
    for prompt in PROMPTS:
        tokens = [*prompt]
        for _ in range(STEPS if prompt is PREFIX else 24):
            tokens.append(int(llama_model.run(tensors, tokens, SMALL, FLOAT32, None)[-1].argmax()))
        expected, bound = (x[len(prompt) - 1 : -1] for x in llama_model.logits(tensors, tokens))
        ordered = np.sort(expected, axis=1)
        assert (ordered[:, -1:] - ordered[:, -2:-1] > 2 * bound).all(), "take another seed: a near tie says nothing"
        found.append(tokens[len(prompt) :])
    return found


# Against the independent model

SHAPES = {
    "tied": (Sizes(), {"tied": True}),
    "untied": (Sizes(), {}),
    "frequencies divided": (Sizes(theta=500000.0), {"scaled": True}),
    "one kv head, three layers": (Sizes(layers=3, kv_heads=1), {}),
    "heads wider than the model": (Sizes(heads=3, kv_heads=3, head_dim=32), {}),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_logits(backend, tmp_path, shape):
    sizes, options = SHAPES[shape]
    case = Case(tmp_path, backend, sizes, **options)
    tokens = np.random.default_rng(1).integers(3, 263, 40).tolist()
    expected, bound = case.expected(tokens)
    cache = case.model.cache(20, 7)
    for n in (1, 6, 7, 8, 40):  # below, at and above a page; several pages
        cache.add_sequence(n, tokens[:n])
        got = case.host(case.model.prefill(cache, [n], [tokens[:n]]))[0]
        assert got.dtype == np.float32
        assert (abs(got - expected[n - 1]) <= bound[n - 1]).all(), (n, abs(got - expected[n - 1]).max(), bound[n - 1])


def test_a_wrong_model_is_seen(tmp_path):
    """A thousandth more in one weight matrix is beyond the bound."""
    case = Case(tmp_path, Backend())
    case.tensors["blk.0.attn_v"] *= 1.001
    expected, bound = case.expected(PREFIX)
    cache = case.model.cache(2)
    cache.add_sequence(0, PREFIX)
    assert (abs(case.model.prefill(cache, [0], [PREFIX])[0] - expected[-1]) > bound[-1]).any()


def test_greedy_tokens_of_64_steps(case, plain):
    engine = Engine(case.model, 6)
    request = engine.add(PREFIX, max_tokens=STEPS)
    assert len(finish(engine, request)[0]) == STEPS == 64
    case.check(plain, request)


def test_float16(backend, tmp_path, plain):
    """Weights, pages and products in float16: what a GPU computes by default, on tensor cores where it has them."""
    case = Case(tmp_path, backend, dtype=np.float16)
    engine = Engine(case.model, 40, 16, chunk=16)
    requests = [engine.add(prompt, max_tokens=12) for prompt in PROMPTS]
    finish(engine, *requests)
    assert not case.exact
    case.check(plain, *requests)


# The same tokens however they are computed


@pytest.mark.parametrize(("page_size", "chunk"), [(16, 512), (7, 5), (1, 2), (3, 64)])
def test_a_batch_gives_what_each_gives_alone(case, plain, page_size, chunk):
    engine = Engine(case.model, 240 // page_size, page_size, chunk=chunk)
    requests = [engine.add(prompt, max_tokens=24) for prompt in PROMPTS]
    finish(engine, *requests)
    case.check(plain, *requests)


def test_sequences_join_and_leave_between_steps(case, plain):
    engine = Engine(case.model, 20)
    requests = []
    for i, prompt in enumerate(PROMPTS):
        requests.append(engine.add(prompt, max_tokens=24 - 5 * i))
        for _ in range(3):
            engine.step()
    finish(engine, *requests)
    case.check(plain, *requests)


def test_prompts_that_begin_alike_share_pages(case, plain):
    engine = Engine(case.model, 60, 4)
    requests = [engine.add(prompt, max_tokens=24) for prompt in (PROMPTS[1], PROMPTS[4], PROMPTS[0])]
    finish(engine, *requests)
    case.check(plain, *requests)
    assert engine.counts["reused_tokens"] == 12 + 12  # three pages of the prefix, by the two that came later
    assert engine.counts["prompt_tokens"] == sum(r.prompt_length for r in requests) - 24


def test_too_few_pages_make_sequences_wait(case, plain):
    engine = Engine(case.model, 12, 4)  # 48 tokens for three sequences of 37, 39 and 25
    requests = [engine.add(prompt, max_tokens=24) for prompt in PROMPTS[:3]]
    finish(engine, *requests)
    case.check(plain, *requests)
    assert engine.counts["preemptions"] > 0 and engine.counts["most_pages"] <= 12


def test_a_cache_may_be_as_small_as_one_sequence(case, plain):
    engine = Engine(case.model, 2, 8)
    requests = [engine.add(PREFIX, max_tokens=16 - len(PREFIX)) for _ in range(3)]  # 16 tokens each
    finish(engine, *requests)
    case.check(plain, *requests)


# Sampling


def test_a_seed_gives_the_same_tokens_whatever_else_is_in_the_batch(case):
    options = {"max_tokens": 12, "sampling": Sampling(temperature=1.0, top_k=50, top_p=0.95, seed=7)}
    alone, together = Engine(case.model, 20), Engine(case.model, 60)
    expected = finish(alone, alone.add(PREFIX, **options))[0]
    others = [together.add(prompt, max_tokens=9) for prompt in PROMPTS]
    got = finish(together, together.add(PREFIX, **options), *others)[0]
    assert got == expected if case.exact else len(got) == 12
    greedy = Engine(case.model, 20)
    assert finish(greedy, greedy.add(PREFIX, max_tokens=12))[0] != expected


def test_samples_have_the_probabilities_of_the_model():
    rng, number = np.random.default_rng(0), 4000
    logits = np.log([0.1, 0.4, 0.3, 0.2]).astype(np.float32)
    for sampling, p in (
        (Sampling(temperature=1.0), [0.1, 0.4, 0.3, 0.2]),
        (Sampling(temperature=0.5), np.array([0.01, 0.16, 0.09, 0.04]) / 0.3),
        (Sampling(temperature=1.0, top_k=2), [0, 4 / 7, 3 / 7, 0]),
        (Sampling(temperature=1.0, top_p=0.65), [0, 4 / 7, 3 / 7, 0]),  # 0.4 is not enough, 0.7 is
        (Sampling(temperature=1.0, top_k=3, top_p=0.5), [0, 4 / 7, 3 / 7, 0]),  # of 0.9: 4/9 is not enough
        (Sampling(temperature=1.0, top_p=1e-9), [0, 1, 0, 0]),
        (Sampling(), [0, 1, 0, 0]),
    ):
        counted = np.bincount([sampling.choose(logits, rng) for _ in range(number)], minlength=4)
        deviation = np.sqrt(number * np.asarray(p) * (1 - np.asarray(p)))
        assert (abs(counted - number * np.asarray(p)) <= 5 * deviation).all(), (sampling, counted)


@pytest.mark.parametrize(("name", "value"), [("temperature", -1.0), ("temperature", float("nan")), ("top_k", -1), ("top_p", 0.0)])
def test_sampling_refuses_what_has_no_meaning(name, value):
    with pytest.raises(ValueError, match=f"Sampling: {name} must be .*; got {value}"):
        Sampling(**{name: value})


# Ends, and refusals


def test_a_stop_token_ends_a_sequence_and_is_not_kept(case):
    engine = Engine(case.model, 8)
    tokens = finish(engine, engine.add(PREFIX, max_tokens=20))[0]
    stop = tokens[6]
    assert finish(engine, engine.add(PREFIX, max_tokens=20, stop=[stop]))[0] == tokens[: tokens.index(stop)]


def test_the_context_ends_a_sequence(backend, tmp_path):
    engine = Engine(Case(tmp_path, backend, Sizes(context=20)).model, 8)
    assert len(finish(engine, engine.add(PREFIX, max_tokens=100))[0]) == 20 - len(PREFIX)
    assert engine.add(PREFIX, max_tokens=0).done and engine.active == 0 and engine.step() == {}


def test_refusals(tmp_path):
    engine = Engine(Case(tmp_path, Backend(), Sizes(context=20)).model, 2, 8)
    for prompt, problem in (
        ([], "the prompt is empty"),
        ([1, 263], "token ids must be within 0 and 262"),
        ([-1], "token ids must be within 0 and 262"),
        ([5] * 20, "the prompt has 20 tokens; the context has room for 20"),
        ([5] * 10, r"10 \+ 10 tokens need more than the 16 places of the cache"),
    ):
        with pytest.raises(ModelError, match=problem):
            engine.add(prompt)
    with pytest.raises(ValueError, match="Engine: chunk must be 2 or more; got 1"):
        Engine(engine.model, 2, chunk=1)


def test_equal_prompts_that_share_no_page_begin_together(tmp_path):
    model = Case(tmp_path, Backend()).model
    engine = Engine(model, 64, 16)
    requests = [engine.add([5, 6, 7], max_tokens=2) for _ in range(9)]
    engine.step()
    assert all(request.generated for request in requests)


def test_numbers_beyond_the_dtype_are_no_text(tmp_path):
    model = Case(tmp_path, Backend()).model
    model._top["norm"] = model._top["norm"] * np.float32(np.inf)
    engine = Engine(model, 4)
    engine.add([5], max_tokens=2)
    with np.errstate(invalid="ignore"), pytest.raises(ModelError, match="float32 has no room for this model's numbers: the largest logit is nan"):
        engine.step()


def test_a_temperature_near_0_takes_the_likeliest():
    logits = np.float32([1, 3, 2])
    assert Sampling(1e-310).choose(logits, np.random.default_rng(0)) == 1
