"""Each architecture from files to a loaded model, and checkpoints that must not load."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from model_dirs import CONFIGS, SHAPE, edit_json, write_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GPT2Config,
    OPTConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3MoeConfig,
)

from swiftfp8.config.schema import Config
from swiftfp8.errors import SwiftFP8Error
from swiftfp8.fusion import FUSED_ARCHITECTURES
from swiftfp8.models.load import load_meta, load_model, load_tokenizer
from swiftfp8.models.source import ModelSource, resolve_source

IDS = torch.arange(3, 15)[None]


def resolved(path: Path) -> tuple[ModelSource, Config]:
    config = Config(model=str(path))
    return resolve_source(config), config


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("architecture", list(CONFIGS))
def test_meta_agrees_with_the_loaded_model(tmp_path: Path, architecture: str, tied: bool) -> None:
    write_model(tmp_path, architecture, tie_word_embeddings=tied)
    source, config = resolved(tmp_path)
    meta = load_meta(source, config)
    model = load_model(source, "fp32")

    linears = {
        name: (module.in_features, module.out_features, module.bias is not None)
        for name, module in model.named_modules()
        if type(module) is torch.nn.Linear
    }
    assert {
        linear.name: (linear.in_features, linear.out_features, linear.bias)
        for linear in meta.linears
    } == linears
    assert meta.total_params == sum(parameter.numel() for parameter in model.parameters())
    assert (meta.tied_head, meta.num_layers, meta.num_kv_heads, meta.head_dim) == (tied, 2, 2, 8)
    assert [linear.name for linear in meta.linears if linear.kind == "head"] == ["lm_head"]
    assert {linear.layer for linear in meta.linears if linear.kind == "linear"} == {0, 1}
    assert "hello" in load_tokenizer(source).get_vocab()
    assert meta.unfused_loss is None
    assert meta.qk_norm == any(name.endswith(".q_norm") for name, _ in model.named_modules())
    assert (meta.unfused_layers is None) == (meta.architecture in FUSED_ARCHITECTURES)


@pytest.mark.parametrize(
    ("hf_config", "learned"),
    [
        (GPT2Config(n_embd=32, n_layer=1, n_head=2, n_positions=40, vocab_size=64), True),
        (
            OPTConfig(
                hidden_size=32,
                word_embed_proj_dim=32,
                ffn_dim=64,
                num_hidden_layers=1,
                num_attention_heads=2,
                max_position_embeddings=40,
                vocab_size=64,
            ),
            True,
        ),
        (CONFIGS["qwen2"](**SHAPE), False),
        (CONFIGS["qwen2"](**{**SHAPE, "max_position_embeddings": SHAPE["vocab_size"]}), False),
    ],
    ids=["gpt2", "opt", "rotary", "rotary, as many positions as words"],
)
def test_learned_positions_are_told_from_rotary_ones(
    tmp_path: Path, hf_config: PreTrainedConfig, learned: bool
) -> None:
    AutoModelForCausalLM.from_config(hf_config).save_pretrained(tmp_path)
    meta = load_meta(*resolved(tmp_path))
    assert meta.learned_positions is learned
    assert meta.max_position_embeddings == hf_config.max_position_embeddings


def test_experts_are_listed_with_those_that_a_token_uses(tmp_path: Path) -> None:
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    hf_config = Qwen3MoeConfig(**shape, **heads, **experts, decoder_sparse_step=1)
    AutoModelForCausalLM.from_config(hf_config).save_pretrained(tmp_path)
    source, config = resolved(tmp_path)
    found = {m.name: m for m in load_meta(source, config).linears if m.kind == "experts"}
    prefix = "model.layers.0.mlp.experts"
    assert set(found) == {f"{prefix}.gate_up_proj", f"{prefix}.down_proj"}
    up = found[f"{prefix}.gate_up_proj"]
    assert (up.in_features, up.out_features, up.count, up.layer) == (32, 32, 2, 0)


def test_weights_without_a_place_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_model(tmp_path, "qwen2")
    file = tmp_path / "model.safetensors"
    extra = {f"model.extra.{n}.weight": torch.ones(2) for n in range(6)}
    save_file({**load_file(file), **extra}, file, metadata={"format": "pt"})
    load_model(resolved(tmp_path)[0], "fp32")
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said == [
        "6 weights have no place in the model: model.extra.0.weight, model.extra.1.weight, "
        "model.extra.2.weight, model.extra.3.weight and 2 more"
    ]


@pytest.mark.parametrize(("dtype", "expected"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_loaded_as_transformers_loads_it(tmp_path: Path, dtype: str, expected: torch.dtype) -> None:
    write_model(tmp_path, "llama", max_shard_size="20KB")
    model = load_model(resolved(tmp_path)[0], dtype)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=expected)
    assert {parameter.dtype for parameter in model.parameters()} == {expected}
    assert model.config.use_cache is False
    for name, parameter in plain.state_dict().items():
        assert torch.equal(parameter, model.state_dict()[name]), name


def test_a_7b_meta_takes_no_weights_and_little_time(tmp_path: Path) -> None:
    """Qwen2.5-7B's shape; sparse files stand for its 14 GiB of weights, so nothing can be read."""
    shape = Qwen2Config(
        vocab_size=152064,
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
    )
    shape.save_pretrained(tmp_path)
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    source, config = resolved(tmp_path)
    load_meta(source, config)  # imports transformers' model code
    started = time.perf_counter()
    meta = load_meta(source, config)
    assert time.perf_counter() - started < 3
    assert meta.total_params == 7_615_616_512
    assert len(meta.linears) == 28 * 7 + 1


def test_a_multimodal_checkpoint_gives_its_language_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWIFTFP8_CACHE", str(tmp_path / "cache"))
    text = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96}
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    torch.manual_seed(0)
    whole = Gemma3ForConditionalGeneration(
        Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    ).eval()
    path = tmp_path / "gemma-mm"
    whole.save_pretrained(path)

    source, config = resolved(path)
    meta = load_meta(source, config)
    model = load_model(source, "fp32").eval()
    assert (meta.architecture, meta.family) == ("Gemma3ForCausalLM", "gemma3")
    assert not any("vision" in linear.name for linear in meta.linears)
    with torch.no_grad():
        # the same weights through the same operations: equal but for the order of a mask's sums
        torch.testing.assert_close(model(IDS).logits, whole(IDS).logits, rtol=1e-5, atol=1e-5)
    assert resolved(path)[0].path == source.path  # made once
    assert len(list((tmp_path / "cache" / "text").iterdir())) == 1


def complaint(path: Path) -> str:
    source, config = resolved(path)
    with pytest.raises(SwiftFP8Error) as caught:
        load_meta(source, config)
        load_model(source, "fp32")
    return str(caught.value)


def rewrite(path: Path, change: object) -> None:
    file = path / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def test_missing_weights_are_named_and_not_made_up(tmp_path: Path) -> None:
    write_model(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    assert "lacks 1 weights of the model: model.layers.1.mlp.up_proj.weight" in complaint(tmp_path)


def test_weights_of_another_shape_are_named(tmp_path: Path) -> None:
    write_model(tmp_path)
    edit_json(tmp_path / "config.json", intermediate_size=48)
    text = complaint(tmp_path)
    assert "another shape" in text
    assert "model.layers.0.mlp.down_proj.weight" in text


def test_an_unknown_architecture(tmp_path: Path) -> None:
    write_model(tmp_path)
    edit_json(tmp_path / "config.json", model_type="qwen99")
    assert "doesn't know model_type 'qwen99'" in complaint(tmp_path)


def test_an_architecture_that_is_no_causal_language_model(tmp_path: Path) -> None:
    write_model(tmp_path)
    edit_json(tmp_path / "config.json", model_type="vit")
    assert "not a causal language model" in complaint(tmp_path)


def test_a_configuration_that_divides_by_zero(tmp_path: Path) -> None:
    write_model(tmp_path)
    edit_json(tmp_path / "config.json", num_attention_heads=0)
    assert "config.json" in complaint(tmp_path)


def test_a_checkpoint_with_code_of_its_own_needs_consent(tmp_path: Path) -> None:
    write_model(tmp_path)
    remote = {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}
    edit_json(tmp_path / "config.json", model_type="odd", auto_map=remote)
    assert "trust_remote_code=true" in complaint(tmp_path)


def test_a_config_that_makes_no_sense(tmp_path: Path) -> None:
    write_model(tmp_path)
    edit_json(tmp_path / "config.json", hidden_size="wide")
    assert "config.json" in complaint(tmp_path)


def test_an_architecture_without_a_family_file_loads(tmp_path: Path) -> None:
    from transformers import OlmoConfig

    config = OlmoConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        pad_token_id=0,
        eos_token_id=2,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    source, run = resolved(tmp_path)
    assert source.family.generic
    assert load_meta(source, run).family == "olmo"
    assert load_model(source, "fp32")(IDS).logits.isfinite().all()


def test_the_gates_of_a_mixture_of_experts_are_routers(tmp_path: Path) -> None:
    from transformers import Qwen2MoeConfig

    config = Qwen2MoeConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=32,
        num_experts=4,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    source, run = resolved(tmp_path)
    kinds = {linear.name: linear.kind for linear in load_meta(source, run).linears}
    assert kinds["model.layers.0.mlp.shared_expert_gate"] == "router"
    assert kinds["model.layers.0.mlp.shared_expert.gate_proj"] == "linear"
    experts = load_model(source, "fp32").model.layers[0].mlp.experts
    assert experts.gate_up_proj.ndim == 3  # left as transformers holds them
