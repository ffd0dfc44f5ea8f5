"""Text to token ids and back, with the vocabulary and merges that a GGUF file holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cuattn._gguf import INSTALL, ModelError

_CONTROL, _USER_DEFINED = 3, 4  # token types; the former are no text
_GPT2 = None  # the expression of GPT-2, which ByteLevel has built in
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_PRETOKENIZERS = {"smollm": (True, _GPT2), "gpt-2": (False, _GPT2), "llama-bpe": (False, _LLAMA3)}
_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


class Tokenizer:
    """Byte-level BPE.

    Parameters
    ----------
    fields : dict
        The metadata of a GGUF file.

    Attributes
    ----------
    stop : set of int
        Ids that end a text.

    Raises
    ------
    ModelError
        If the package tokenizers is missing, or the file has another kind of vocabulary.
    """

    def __init__(self, fields: dict[str, Any]) -> None:
        try:
            import tokenizers
            from tokenizers import decoders, models, pre_tokenizers
        except ImportError:
            raise ModelError(f"text needs the package tokenizers: {INSTALL}") from None
        kind, split = (fields.get(f"tokenizer.ggml.{name}") for name in ("model", "pre"))
        if kind != "gpt2" or split not in _PRETOKENIZERS:
            known = ", ".join(_PRETOKENIZERS)
            raise ModelError(f"the vocabulary must be gpt2 with one of {known}; the file has {kind} with {split}")
        try:
            words, types, pairs = (fields[f"tokenizer.ggml.{name}"] for name in ("tokens", "token_type", "merges"))
        except KeyError as error:
            raise ModelError(f"the file has no entry {error}") from None
        merges = [tuple(pair.split(" ")) for pair in pairs]
        self._ids = {word: i for i, word in enumerate(words)}
        whole = split == "llama-bpe"  # such a vocabulary's words are tokens whether merges make them or not
        self._bpe = tokenizers.Tokenizer(models.BPE(self._ids, merges, ignore_merges=whole))
        digits, expression = _PRETOKENIZERS[split]
        steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
        if expression is not None:
            steps.append(pre_tokenizers.Split(tokenizers.Regex(expression), "isolated"))
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=expression is None))
        self._bpe.pre_tokenizer = pre_tokenizers.Sequence(steps)
        self._bpe.decoder = decoders.ByteLevel()
        for added, add in ((_CONTROL, self._bpe.add_special_tokens), (_USER_DEFINED, self._bpe.add_tokens)):
            add([tokenizers.AddedToken(word, normalized=False) for word, kind in zip(words, types) if kind == added])
        wanted = {fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")}
        wanted |= {self._ids.get(word) for word in ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>")}
        self.stop = {int(i) for i in wanted if i is not None}
        first = fields.get("tokenizer.ggml.bos_token_id")
        begins = fields.get("tokenizer.ggml.add_bos_token", split == "llama-bpe")
        self._first = [int(first)] if begins and first is not None else []
        self._template = str(fields.get("tokenizer.chat_template", ""))

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, special tokens among them by name.

        Parameters
        ----------
        text : str
            The text.

        Returns
        -------
        list of int
            The ids, after the one that begins every text if the model has one.
        """
        return self._first + self._bpe.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, without special tokens.

        Parameters
        ----------
        ids : sequence of int
            The ids.

        Returns
        -------
        str
            U+FFFD where bytes are no UTF-8.
        """
        return self._bpe.decode(list(ids), skip_special_tokens=True)

    def chat(self, question: str, system: str | None = None) -> str:
        """A question as the model was trained to see it, up to where its answer begins.

        Parameters
        ----------
        question : str
            What the user says. Special tokens in it count as such: who answers for others must take them out.
        system : str, optional
            What the model is told about itself. Default: what SmolLM2's template says, else nothing.

        Returns
        -------
        str
            To be encoded.

        Raises
        ------
        ModelError
            If the model has no chat template of this form.
        """
        if "<|im_start|>" not in self._template:
            raise ModelError("the model has no chat template with <|im_start|>; leave out --chat")
        if system is None and _SYSTEM in self._template:
            system = _SYSTEM
        turns = [] if system is None else [("system", system)]
        turns.append(("user", question))
        return "".join(f"<|im_start|>{who}\n{text}<|im_end|>\n" for who, text in turns) + "<|im_start|>assistant\n"


class Stream:
    """Text of one sequence as its tokens come: whole characters only, whose bytes several tokens may share.

    Parameters
    ----------
    tokenizer : Tokenizer
        Of the model.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._pending: list[int] = []

    def add(self, token: int) -> str:
        """One more token.

        Parameters
        ----------
        token : int
            Its id.

        Returns
        -------
        str
            What can be printed now.
        """
        self._pending.append(token)
        text = self._tokenizer.decode(self._pending)
        if text.endswith("\ufffd"):
            return ""
        self._pending.clear()
        return text

    def end(self) -> str:
        """What is left.

        Returns
        -------
        str
            Bytes that never became a character, as U+FFFD.
        """
        text = self._tokenizer.decode(self._pending)
        self._pending.clear()
        return text
