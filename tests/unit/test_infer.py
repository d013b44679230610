"""Chatting: tokens stream, history is kept, an adapter changes answers, an export is loaded."""

import io
import json
import math
import os
import shutil
from pathlib import Path

import pytest
import torch
from export_kit import tiny_model
from peft import LoraConfig, get_peft_model
from rich.console import Console
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from swiftfp8.config.schema import ExportConfig
from swiftfp8.errors import SwiftFP8Error
from swiftfp8.export.export import export_checkpoint
from swiftfp8.infer import Sampling, chat, check_sampling, load_for_chat, stream_answer

SHORT = Sampling(max_new_tokens=6)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with a tokenizer of 300 made-up words and a chat template."""
    directory = tmp_path_factory.mktemp("infer") / "model"
    tiny_model("qwen3").save_pretrained(directory)
    vocabulary = {"<end>": 0, "<pad>": 1} | {f"w{n}": n for n in range(2, 300)}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<end>", pad_token="<pad>", unk_token="<pad>"
    )
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
        "{% if add_generation_prompt %}w2 {% endif %}"
    )
    tokenizer.save_pretrained(directory)
    return directory


def silent() -> Console:
    return Console(file=io.StringIO())


def answer(model_dir: Path, adapter: Path | None = None, **options: object) -> str | None:
    settings = {"prompt": "w5 w6", "sampling": SHORT, "console": silent(), **options}
    return chat(model_dir, adapter, **settings)


def test_greedy_answers_repeat_and_stream_in_pieces(model_dir: Path) -> None:
    first = answer(model_dir)
    assert first and first == answer(model_dir)
    from transformers import AutoTokenizer

    model, tokenizer = load_for_chat(model_dir), AutoTokenizer.from_pretrained(model_dir)
    messages = [{"role": "user", "content": "w5 w6"}]
    pieces = [piece for piece in stream_answer(model, tokenizer, messages, SHORT) if piece]
    assert "".join(pieces) == first
    assert len(pieces) > 2


def test_an_answer_ends_where_the_chat_template_ends_a_turn(model_dir: Path) -> None:
    from transformers import AutoTokenizer

    model, tokenizer = load_for_chat(model_dir), AutoTokenizer.from_pretrained(model_dir)
    messages = [{"role": "user", "content": "w5 w6"}]
    said = "".join(stream_answer(model, tokenizer, messages, SHORT)).split()
    assert len(said) == SHORT.max_new_tokens
    end = next(word for word in said if word not in said[:1])  # not the first: something is said
    tokenizer.add_special_tokens({"additional_special_tokens": [end]})
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{% endfor %}", "{% if m['role'] == 'assistant' %}" + end + " {% endif %}{% endfor %}"
    )
    stopped = "".join(stream_answer(model, tokenizer, messages, SHORT)).split()
    assert stopped == said[: said.index(end)]


def test_thinking_is_left_to_the_template_unless_told(model_dir: Path) -> None:
    from transformers import AutoTokenizer

    model, tokenizer = load_for_chat(model_dir), AutoTokenizer.from_pretrained(model_dir)
    tokenizer.chat_template += (
        "{% if enable_thinking is defined %}{{ 'w7' if enable_thinking else 'w8' }}{% endif %}"
    )
    asked: list[list[int]] = []
    generate = model.generate

    def record(**options: torch.Tensor) -> torch.Tensor:
        asked.append(options["input_ids"][0].tolist())
        return generate(**options)

    model.generate = record
    for thinking in (None, True, False):
        sampling = Sampling(max_new_tokens=1, enable_thinking=thinking)
        list(stream_answer(model, tokenizer, [{"role": "user", "content": "w5"}], sampling))
    plain = asked[0]
    assert asked[1:] == [[*plain, 7], [*plain, 8]]


def test_leaving_early_stops_the_generation(model_dir: Path) -> None:
    from transformers import AutoTokenizer

    model, tokenizer = load_for_chat(model_dir), AutoTokenizer.from_pretrained(model_dir)
    steps: list[int] = []
    model.register_forward_hook(lambda *arguments: steps.append(1))
    messages = [{"role": "user", "content": "w5"}]
    stream = stream_answer(model, tokenizer, messages, Sampling(max_new_tokens=5000))
    next(stream)
    stream.close()
    assert len(steps) < 5000


def test_sampling_follows_the_seed(model_dir: Path) -> None:
    draws = [
        answer(model_dir, sampling=Sampling(max_new_tokens=8, temperature=2.0, seed=seed))
        for seed in (1, 1, 2)
    ]
    assert draws[0] == draws[1] != draws[2]


def test_an_adapter_is_used_and_its_export_answers_the_same(
    model_dir: Path, tmp_path: Path
) -> None:
    model = get_peft_model(
        tiny_model("qwen3"), LoraConfig(r=4, lora_alpha=64, target_modules="all-linear")
    )
    torch.manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(tmp_path / "adapter")
    adapted = answer(model_dir, tmp_path / "adapter")
    settings = ExportConfig(format="bf16", verify=False)
    export_checkpoint(model_dir, tmp_path / "adapter", tmp_path / "merged", settings)
    merged = answer(tmp_path / "merged")
    # a random model's later tokens hang on ties that the merge's BF16 rounding may turn
    assert merged and adapted and merged.split()[:3] == adapted.split()[:3]
    assert adapted.split()[:3] != answer(model_dir).split()[:3]


@pytest.mark.parametrize("name", ["fp8_block", "compressed_tensors", "fp8"])
def test_an_fp8_export_answers(model_dir: Path, tmp_path: Path, name: str) -> None:
    """With its scales, also where transformers by itself would leave them out."""
    settings = ExportConfig(format=name, verify=False)
    export_checkpoint(model_dir, None, tmp_path / "fp8", settings)
    assert answer(tmp_path / "fp8")
    weight = load_for_chat(tmp_path / "fp8").model.layers[0].mlp.up_proj.weight.float()
    assert weight.std() > 0.01
    original = load_for_chat(model_dir).model.layers[0].mlp.up_proj.weight.float()
    assert (weight - original).norm() < 0.03 * original.norm()


def test_a_conversation(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns add up, /reset forgets them, Ctrl-D leaves."""
    seen: list[list[str]] = []

    def fake_answer(model, tokenizer, messages, sampling, console) -> str:
        seen.append([message["content"] for message in messages])
        return "reply"

    lines = iter(["one", "two", "/help", "/reset", "three"])

    def read(self: Console, prompt: str) -> str:
        line = next(lines, None)
        if line is None:
            raise EOFError
        return line

    monkeypatch.setattr("swiftfp8.infer._answer", fake_answer)
    monkeypatch.setattr(Console, "input", read)
    assert answer(model_dir, prompt=None, system="sys") is None
    assert seen == [["sys", "one"], ["sys", "one", "reply", "two"], ["sys", "three"]]


def test_a_truncated_weight_file_is_named(model_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(model_dir, tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)
    with pytest.raises(SwiftFP8Error, match=r"model.safetensors is truncated") as caught:
        answer(tmp_path / "model")
    assert caught.value.where == str(weights)
    assert f"swiftfp8 export verify dir={tmp_path / 'model'}" in str(caught.value.fix)


@pytest.mark.parametrize("exported", [False, True])
def test_a_missing_weight_is_not_drawn_at_random(
    model_dir: Path, tmp_path: Path, exported: bool
) -> None:
    directory = tmp_path / "model"
    if exported:
        settings = ExportConfig(format="fp8_block", verify=False)
        export_checkpoint(model_dir, None, directory, settings)
    else:
        shutil.copytree(model_dir, directory)
    weights = directory / "model.safetensors"
    tensors = load_file(weights)
    kept = {name: value for name, value in tensors.items() if "1.mlp.up_proj" not in name}
    assert len(kept) < len(tensors)
    save_file(kept, weights, {"format": "pt"})
    with pytest.raises(SwiftFP8Error, match=r"lacks 1 weights of the model: .*1.mlp.up_proj"):
        answer(directory)


def spoil(directory: Path, how: str) -> None:
    file, config = directory / "adapter_model.safetensors", directory / "adapter_config.json"
    tensors = load_file(file)
    if how == "empty":
        tensors = {}
    elif how == "NaN":
        next(iter(tensors.values()))[0, 0] = torch.nan
    else:
        said = json.loads(config.read_text())
        config.write_text(json.dumps({**said, "peft_type": "IA3"}))
    save_file(tensors, file)


@pytest.mark.parametrize(
    ("how", "said"),
    [("empty", "lacks weights"), ("another type", "lacks weights"), ("NaN", "holds NaN")],
)
def test_an_adapter_that_changes_nothing_or_all_is_refused(
    model_dir: Path, tmp_path: Path, how: str, said: str
) -> None:
    model = get_peft_model(tiny_model("qwen3"), LoraConfig(r=4, target_modules="all-linear"))
    model.save_pretrained(tmp_path)
    spoil(tmp_path, how)
    with pytest.raises(SwiftFP8Error, match=said) as caught:
        answer(model_dir, tmp_path)
    assert caught.value.where == str(tmp_path)


def test_a_damaged_adapter_is_named(model_dir: Path, tmp_path: Path) -> None:
    model = get_peft_model(tiny_model("qwen3"), LoraConfig(r=4, target_modules="all-linear"))
    model.save_pretrained(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(SwiftFP8Error, match="the adapter's file is damaged") as caught:
        answer(model_dir, tmp_path)
    assert caught.value.where == str(file)


def test_what_can_not_be_loaded(model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(SwiftFP8Error, match="no tokenizer files") as caught:
        answer(tmp_path)
    assert "copy tokenizer.json" in str(caught.value.fix)
    with pytest.raises(SwiftFP8Error, match="can't load the adapter"):
        answer(model_dir, tmp_path)
    with pytest.raises(SwiftFP8Error, match="negative"):
        answer(model_dir, sampling=Sampling(temperature=-1.0))


@pytest.mark.parametrize("temperature", [math.nan, math.inf])
def test_a_temperature_that_is_no_number_is_refused(temperature: float) -> None:
    with pytest.raises(SwiftFP8Error, match="temperature must be finite"):
        check_sampling(Sampling(temperature=temperature))


def test_a_seed_that_torch_does_not_take_is_refused() -> None:
    check_sampling(Sampling(seed=2**64 - 1))
    for seed in (10**20, -(2**63) - 1):
        with pytest.raises(SwiftFP8Error, match="64 bits"):
            check_sampling(Sampling(seed=seed))
