"""A GGUF file becomes a BF16 directory, once, whole, and with its tokenizer."""

from __future__ import annotations

import os
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tokenizers.pre_tokenizers import ByteLevel

from swiftfp8.config.schema import Config
from swiftfp8.errors import SwiftFP8Error
from swiftfp8.models import gguf as module
from swiftfp8.models.load import load_meta, load_model, load_tokenizer
from swiftfp8.models.source import resolve_source

HIDDEN, MLP, HEADS, LAYERS = 32, 64, 4, 2
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


def write_gguf(file: Path) -> dict[str, np.ndarray]:
    """A random Qwen2 model with a byte-level tokenizer; returns the tensors as written."""
    rng = np.random.default_rng(0)
    tokens = [*sorted(ByteLevel.alphabet()), "Ġt", "he", "Ġthe", "<|endoftext|>"]
    names = {"token_embd.weight": (len(tokens), HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        names |= {
            f"blk.{layer}.{name}": shape
            for name, shape in {
                "attn_q.weight": (HIDDEN, HIDDEN),
                "attn_q.bias": (HIDDEN,),
                "attn_k.weight": (HIDDEN // 2, HIDDEN),
                "attn_k.bias": (HIDDEN // 2,),
                "attn_v.weight": (HIDDEN // 2, HIDDEN),
                "attn_v.bias": (HIDDEN // 2,),
                "attn_output.weight": (HIDDEN, HIDDEN),
                "ffn_gate.weight": (MLP, HIDDEN),
                "ffn_up.weight": (MLP, HIDDEN),
                "ffn_down.weight": (HIDDEN, MLP),
                "attn_norm.weight": (HIDDEN,),
                "ffn_norm.weight": (HIDDEN,),
            }.items()
        }
    tensors = {name: rng.standard_normal(shape, np.float32) for name, shape in names.items()}

    writer = gguf.GGUFWriter(file, "qwen2")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS // 2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (len(tokens) - 1) + [3])
    writer.add_token_merges(["Ġ t", "h e", "Ġt he"])
    writer.add_eos_token_id(len(tokens) - 1)
    writer.add_chat_template(TEMPLATE)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SWIFTFP8_CACHE", str(tmp_path / "cache"))
    return tmp_path / "tiny-model.gguf"


def test_weights_tokenizer_and_template_come_over(file: Path) -> None:
    tensors = write_gguf(file)
    source = resolve_source(Config(model=str(file)))
    assert (source.name, source.family.name) == ("tiny-model", "qwen2_5")
    assert source.path.is_relative_to(file.parent / "cache")
    meta = load_meta(source, Config())
    assert (meta.architecture, meta.num_layers, meta.num_kv_heads) == ("Qwen2ForCausalLM", 2, 2)

    state = load_model(source, "bf16").state_dict()
    for theirs, ours in {
        "blk.1.ffn_up.weight": "model.layers.1.mlp.up_proj.weight",
        "blk.0.attn_q.bias": "model.layers.0.self_attn.q_proj.bias",
        "token_embd.weight": "model.embed_tokens.weight",
    }.items():
        assert torch.equal(state[ours], torch.from_numpy(tensors[theirs]).bfloat16()), ours

    tokenizer = load_tokenizer(source)
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer.convert_ids_to_tokens(tokenizer("a the").input_ids) == ["a", "Ġthe"]


def test_converted_once_and_again_when_the_file_changes(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(file)
    calls = []
    convert = module._convert

    def counted(file: Path, folder: Path) -> None:
        calls.append(file)
        convert(file, folder)

    monkeypatch.setattr(module, "_convert", counted)
    first = module.convert_gguf(file)
    assert module.convert_gguf(file) == first
    assert len(calls) == 1
    os.utime(file, (1, 1))
    assert module.convert_gguf(file) != first
    assert len(calls) == 2


@pytest.mark.parametrize("share", [0.01, 0.5, 0.999])
def test_a_cut_off_file_leaves_nothing_behind(file: Path, share: float) -> None:
    write_gguf(file)
    os.truncate(file, int(file.stat().st_size * share))
    with pytest.raises(SwiftFP8Error, match=r"can't be converted(.|\n)*tiny-model.gguf"):
        module.convert_gguf(file)
    assert list((file.parent / "cache" / "gguf").iterdir()) == []


def test_a_full_disk_leaves_nothing_behind(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(file)

    def full(file: Path, folder: Path) -> None:
        (folder / "half").write_text("x")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "_convert", full)
    with pytest.raises(SwiftFP8Error, match=r"No space left(.|\n)*SWIFTFP8_CACHE"):
        module.convert_gguf(file)
    assert list((file.parent / "cache" / "gguf").iterdir()) == []


def test_a_tokenizer_that_cuts_common_words_is_noticed() -> None:
    """Gemma's byte-pair vocabulary without its merges, as old transformers reads it."""
    from transformers import GemmaTokenizer

    pieces = ["<pad>", "<eos>", "<bos>", "<unk>", *"\u2581abcdefghijklmnopqrstuvwxyz"]
    for word in ("the", "and", "that"):
        pieces += ["\u2581" + word[:end] for end in range(1, len(word) + 1)]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    wrong = GemmaTokenizer(vocab=vocabulary, merges=[])
    assert module._splits_common_words(wrong)
    rebuilt = module._rebuild_from_vocabulary(wrong)
    assert not module._splits_common_words(rebuilt)
    ids = rebuilt("a that").input_ids
    assert rebuilt.convert_ids_to_tokens(ids) == ["<bos>", "a", "\u2581that"]
