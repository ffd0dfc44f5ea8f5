"""SmolLM2 against llama.cpp on the same float32 weights: ``python -m tests.oracle_llama`` (extras `llm`, `oracle`).

Not part of the suite: it writes a file of 540 MB and takes minutes. Logits of both are within `llama_model.logits`' bound
of the exact ones, so within twice that of each other; and the likeliest tokens are the same.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import gguf
import llama_cpp
import numpy as np

from cuattn._gguf import default_path
from cuattn.llama import Engine, Llama
from tests import llama_model

PROMPTS = ("1, 2, 3, 4, 5,", "The three primary colours are", "def fibonacci(n):\n", "Der Name der Rose ist ein Roman von")
STEPS = 64


def in_float32(source: Path, target: Path) -> dict[str, np.ndarray]:
    """The same model with dequantised weights, and its tensors."""
    reader, writer, tensors = gguf.GGUFReader(source), gguf.GGUFWriter(target, "llama"), {}
    for name, field in reader.fields.items():
        if field.types and not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
            kind, value = field.types[0], field.contents()
            writer.add_array(name, value) if kind == gguf.GGUFValueType.ARRAY else writer.add_key_value(name, value, kind)
    for tensor in reader.tensors:
        values = np.array(gguf.dequantize(tensor.data, tensor.tensor_type), np.float32)
        writer.add_tensor(tensor.name, values)
        tensors[tensor.name.removesuffix(".weight")] = values.astype(np.float64)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "float32.gguf"
        tensors = in_float32(default_path(), path)
        model = Llama.load(path)
        theirs = llama_cpp.Llama(str(path), n_ctx=512, logits_all=True, type_k=0, type_v=0, flash_attn=False, verbose=False)
        c = model.config
        sizes = llama_model.Sizes(
            c.num_layers, c.hidden_size, c.num_heads, c.num_kv_heads, c.head_dim, 0, c.max_positions, c.rope_theta, c.rms_norm_eps
        )
        for prompt in PROMPTS:
            ids = model.tokenizer.encode(prompt)
            assert ids == theirs.tokenize(prompt.encode(), add_bos=False, special=True)
            cache, logits = model.cache(64), []
            cache.add_sequence(0)
            for token in ids:
                cache.append(0, [token])
                logits.append(model.prefill(cache, [0], [[token]])[0])
            theirs.reset()
            theirs.eval(ids)
            apart = abs(np.array(logits) - theirs.scores[: len(ids)]).max(1)
            bound = 2 * llama_model.logits(tensors, ids, sizes)[1][:, 0]
            assert (apart <= bound).all(), (apart, bound)
            engine, chosen = Engine(model, 64), []
            request = engine.add(ids, max_tokens=STEPS)
            while not request.done:
                engine.step()
            for _ in range(STEPS):
                chosen.append(int(theirs.scores[theirs.n_tokens - 1].argmax()))
                theirs.eval(chosen[-1:])
            assert request.generated == chosen
            print(f"{prompt!r}: logits {apart.max():.1e} apart, bound {bound.min():.1e}; {STEPS} of {STEPS} tokens equal", flush=True)


if __name__ == "__main__":
    main()
