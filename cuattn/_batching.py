"""Continuous batching: sequences join and leave between steps, over one cache of pages."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from cuattn._gguf import ModelError
from cuattn._sampling import Sampling
from cuattn.paged_cache import OutOfPages

if TYPE_CHECKING:
    from cuattn.llama import Llama


@dataclass(eq=False)
class Request:
    """A sequence that is being generated.

    Parameters
    ----------
    tokens : list of int
        The prompt, then what has been generated.
    prompt_length, max_tokens : int
        Tokens of the prompt, and how many are to be generated at most.
    stop : set of int
        Tokens that end it; they are not kept.
    sampling : Sampling
        How tokens are chosen.

    Attributes
    ----------
    computed : int
        Tokens whose keys and values are in the pages.
    done : bool
        Whether it has ended.
    """

    tokens: list[int]
    prompt_length: int
    max_tokens: int
    stop: set[int]
    sampling: Sampling
    computed: int = 0
    done: bool = False
    rng: np.random.Generator = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.sampling.seed)

    @property
    def generated(self) -> list[int]:
        """The tokens after the prompt.

        Returns
        -------
        list of int
        """
        return self.tokens[self.prompt_length :]

    @property
    def pending(self) -> list[int]:
        """The tokens that are still to be computed, one at least.

        Returns
        -------
        list of int
        """
        return self.tokens[self.computed :]


class Engine:
    """Generates many sequences at once.

    Parameters
    ----------
    model : Llama
        The network.
    num_pages, page_size : int
        Of the cache.
    chunk : int
        Tokens of prompts that one step computes at most; a longer prompt takes several.

    Attributes
    ----------
    cache : PagedKVCache
        Keys and values of all sequences.
    counts : dict of str to float
        Since the beginning: prompt_tokens and generated_tokens computed, and prompt_seconds and generated_seconds;
        new_tokens, reused_tokens, most_pages that were in use, and preemptions.

    Notes
    -----
    A step that raises leaves sequences between two states: make a new engine.
    """

    def __init__(self, model: Llama, num_pages: int, page_size: int = 16, *, chunk: int = 512) -> None:
        if chunk < 2:
            raise ValueError(f"Engine: chunk must be 2 or more; got {chunk}")
        self.model, self.cache, self.chunk = model, model.cache(num_pages, page_size), chunk
        self.counts: defaultdict[str, float] = defaultdict(float)
        self._running: list[Request] = []  # those with pages, oldest first
        self._waiting: deque[Request] = deque()

    @property
    def active(self) -> int:
        """How many sequences are not done.

        Returns
        -------
        int
        """
        return len(self._running) + len(self._waiting)

    def add(
        self, prompt: Sequence[int], *, max_tokens: int = 128, stop: Iterable[int] = (),
        sampling: Sampling | None = None,
    ) -> Request:  # fmt: skip
        """A new sequence; the next step begins it if there are pages.

        Parameters
        ----------
        prompt : sequence of int
            Token ids, one at least.
        max_tokens : int
            How many to generate at most; fewer if the context ends before.
        stop : iterable of int
            Tokens that end it.
        sampling : Sampling, optional
            Default: always the most probable token.

        Returns
        -------
        Request
            `step` changes it.

        Raises
        ------
        ModelError
            If the prompt is empty, has an id that is none, or is longer than the context or the cache.
        """
        config, room = self.model.config, self.cache.stats()["total"] * self.cache.page_size
        if len(prompt) == 0:
            raise ModelError("the prompt is empty")
        if not 0 <= min(prompt) <= max(prompt) < config.vocab_size:
            raise ModelError(f"token ids must be within 0 and {config.vocab_size - 1}")
        if len(prompt) >= config.max_positions:
            raise ModelError(f"the prompt has {len(prompt)} tokens; the context has room for {config.max_positions}")
        max_tokens = min(max_tokens, config.max_positions - len(prompt))
        if len(prompt) + max_tokens > room:
            raise ModelError(f"{len(prompt)} + {max_tokens} tokens need more than the {room} places of the cache")
        request = Request([*prompt], len(prompt), max_tokens, set(stop), sampling or Sampling(), done=max_tokens <= 0)
        if not request.done:
            self._waiting.append(request)
        return request

    def step(self) -> dict[Request, int]:
        """Compute a chunk of prompts if any are left, else one token of every sequence.

        Returns
        -------
        dict of Request to int
            The new token of each sequence that got one; one that ends its sequence is not among `generated`.
        """
        began = time.perf_counter()
        batch = self._chunk()
        kind = "prompt" if batch else "generated"
        if not batch:
            batch = self._grow({request: 1 for request in self._running})
        if not batch:
            return {}
        self.counts["most_pages"] = max(self.counts["most_pages"], self.cache.stats()["in_use"])
        logits = self._prefill(batch) if kind == "prompt" else self._decode([*batch])
        for request, number in batch.items():
            request.computed += number
            self.cache.publish(request, request.computed)
        new = self._choose([*batch], logits)
        self.counts[f"{kind}_tokens"] += sum(batch.values())
        self.counts[f"{kind}_seconds"] += time.perf_counter() - began
        return new

    def _chunk(self) -> dict[Request, int]:
        """The prompts, old and new, that this step computes, and how many tokens of each; they have got their pages."""
        growing: dict[Request, int] = {}
        room = self.chunk
        for request in self._running:
            number = min(len(request.pending), room)
            if len(request.pending) > 1 and number:
                growing[request], room = number, room - number
        batch = self._grow(growing)
        room = self.chunk - sum(batch.values())
        page = self.cache.page_size
        begins: set[tuple[int, ...]] = set()  # tokens of new sequences, up to the first page that this step computes
        while room and self._waiting:
            request = self._waiting[0]
            found = self.cache.match_prefix(request.tokens)
            begin = tuple(request.tokens[: found + page])
            needed = -(-(len(request.tokens) + 1) // page) + len(self._running)  # and a page for each of the others
            if (begin in begins and len(begin) == found + page) or self.cache.num_free() < needed:
                break  # this step computes what the request can reuse in the next one; or there is no room for it
            number = min(len(request.tokens) - found, room)
            request.computed = self.cache.add_sequence(request, request.tokens[: found + number])
            self.counts["reused_tokens"] += request.computed
            begins.add(begin)
            self._running.append(self._waiting.popleft())
            batch[request], room = number, room - number
        return batch

    def _grow(self, wanted: dict[Request, int]) -> dict[Request, int]:
        """Pages for the next tokens of each sequence. When there are too few, the youngest sequences have to wait."""
        wanted = dict(wanted)
        while wanted:
            try:
                self.cache.append_many({r: r.pending[:number] for r, number in wanted.items()})
                break
            except OutOfPages:
                youngest = self._running[-1]
                self._release(youngest)
                self._waiting.appendleft(youngest)
                wanted.pop(youngest, None)
                self.counts["preemptions"] += 1
        return wanted

    def _release(self, request: Request) -> None:
        self.cache.free(request)
        self._running.remove(request)
        request.computed = 0

    def _prefill(self, batch: dict[Request, int]) -> Any:
        return self.model.prefill(self.cache, [*batch], [r.pending[:number] for r, number in batch.items()])

    def _decode(self, batch: list[Request]) -> Any:
        tokens = self.model.xp.asarray(np.array([request.pending[0] for request in batch]))
        return self.model.decode(self.cache, tokens, self.cache.block_table(batch), self.cache.cache_seqlens(batch, 1))

    def _choose(self, batch: list[Request], logits: Any) -> dict[Request, int]:
        """The next token of each sequence that is computed to its end; sequences that end leave."""
        new = {}
        best_of, largest = logits.argmax(axis=1).tolist(), logits.max(axis=1).tolist()  # waits for the device
        for row, (request, best) in enumerate(zip(batch, best_of)):
            if request.computed < len(request.tokens):
                continue
            if not np.isfinite(largest[row]):
                rule = f"{self.model.dtype} has no room for this model's numbers"
                raise ModelError(f"{rule}: the largest logit is {largest[row]}")
            if request.sampling.temperature:
                best = request.sampling.choose(to_host(logits[row]), request.rng)
            new[request] = best
            if best not in request.stop:
                request.tokens.append(best)
                self.counts["new_tokens"] += 1
            request.done = best in request.stop or len(request.generated) == request.max_tokens
            if request.done:
                self._release(request)
        return new


def to_host(array: Any) -> np.ndarray:
    """A NumPy or CuPy array as a NumPy array."""
    return array if isinstance(array, np.ndarray) else array.get()
