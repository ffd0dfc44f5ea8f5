"""Which token comes next."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen from its logits.

    Parameters
    ----------
    temperature : float
        What logits are divided by; 0 takes the largest.
    top_k : int
        Only the k most probable tokens; 0 is all.
    top_p : float
        Only the most probable tokens that together reach this probability.
    seed : int, optional
        Of the random numbers of one sequence, whatever else is in the batch.

    Raises
    ------
    ValueError
        If a number is out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        for name, rule, right in (
            ("temperature", "0 or more", 0 <= self.temperature < np.inf),
            ("top_k", "an integer, 0 or more", isinstance(self.top_k, int) and self.top_k >= 0),
            ("seed", "0 or more", self.seed is None or self.seed >= 0),
            ("top_p", "above 0, at most 1", 0 < self.top_p <= 1),
        ):
            if not right:
                raise ValueError(f"Sampling: {name} must be {rule}; got {getattr(self, name)}")

    def choose(self, logits: np.ndarray, rng: np.random.Generator) -> int:
        """One token.

        Parameters
        ----------
        logits : numpy.ndarray, (vocab_size,)
            Of the next token.
        rng : numpy.random.Generator
            Not used with temperature 0.

        Returns
        -------
        int
            Its id; of equal logits the smaller one.
        """
        if self.temperature == 0:
            return int(logits.argmax())
        order = np.argsort(-logits, kind="stable")[: self.top_k or None]
        with np.errstate(over="ignore"):  # far below: -inf
            p = np.exp((logits[order].astype(np.float64) - float(logits[order[0]])) / self.temperature)
        cumulative = np.cumsum(p / p.sum())
        kept = int(np.searchsorted(cumulative, self.top_p)) + 1 if self.top_p < 1 else len(order)
        reached = cumulative[: min(kept, len(order))]
        return int(order[np.searchsorted(reached, rng.random() * reached[-1], side="right")])
