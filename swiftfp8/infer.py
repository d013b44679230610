"""Talk to what was trained: a run's adapter on its base, a merged model, or an FP8 export.

An FP8 export runs dequantized here: transformers' own FP8 matmul comes from a kernel package on a
hub. It gives the exported weights' answers; the speed is for a serving engine.
"""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from swiftfp8.errors import SwiftFP8Error
from swiftfp8.models.turns import turn_ends
from swiftfp8.tasks import TASKS, Trained

_HELP = "type a message; /reset forgets the conversation, /exit or Ctrl-D ends"
_EXIT = frozenset({"/exit", "/quit"})


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How an answer is asked for and drawn. Temperature 0 takes the likeliest token each time.

    `enable_thinking` goes to the chat template; None leaves it to the template's default.
    """

    max_new_tokens: int = 512
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 42
    enable_thinking: bool | None = None


def chat(
    model_dir: Path,
    adapter_dir: Path | None = None,
    *,
    prompt: str | None = None,
    system: str | None = None,
    sampling: Sampling | None = None,
    trust_remote_code: bool = False,
    console: Console | None = None,
) -> str | None:
    """Answer `prompt`, or talk until the user leaves; tokens are printed as they come.

    Returns:
        The answer to `prompt`, None after a conversation.

    Raises:
        SwiftFP8Error: a model, adapter or tokenizer that can't be loaded.
    """
    console = console or Console()
    sampling = sampling or Sampling()
    check_sampling(sampling)
    tokenizer = load_chat_tokenizer(adapter_dir, model_dir, trust_remote_code=trust_remote_code)
    with console.status("loading the model"):
        model = load_for_chat(model_dir, adapter_dir, trust_remote_code=trust_remote_code)
    opening = [{"role": "system", "content": system}] if system else []
    if prompt is not None:
        return _answer(model, tokenizer, [*opening, _user(prompt)], sampling, console)
    console.print(_HELP, style="dim")
    _converse(model, tokenizer, opening, sampling, console)
    return None


def load_for_chat(
    model_dir: Path,
    adapter_dir: Path | None = None,
    *,
    trust_remote_code: bool = False,
    trained: Trained | None = None,
) -> Any:
    """The model for inference on the best device here, with the adapter on it if there is one.

    `trained` says what it was trained for, where that is no language model.
    """
    from safetensors import SafetensorError

    from swiftfp8.models.checkpoint import check_safetensors, weight_files
    from swiftfp8.models.load import check_loaded
    from swiftfp8.models.quiet import quiet_transformers
    from swiftfp8.models.task_model import auto_class, head_modules, may_be_missing, set_head

    model_class = auto_class(TASKS[trained.task if trained else "sft"])
    device, dtype = _placement()
    config, quantization = _read_config(model_dir, trust_remote_code)
    if trained is not None and trained.head is not None:
        set_head(config, trained.head, trained.pad_token_id)
    if _is_fp8_without_blocks(config):
        model = _dequantized(model_dir, dtype, trust_remote_code)
        return (_with_adapter(model, adapter_dir) if adapter_dir else model).to(device).eval()
    try:
        with quiet_transformers():
            model, info = model_class.from_pretrained(
                model_dir,
                config=config,
                dtype=dtype,
                trust_remote_code=trust_remote_code,
                ignore_mismatched_sizes=True,  # reported below, by name
                output_loading_info=True,
                **quantization,
            )
    except SafetensorError as error:
        for file in weight_files(model_dir):
            check_safetensors(file)  # names the one that is cut off
        raise SwiftFP8Error(
            f"a weight file is damaged: {error}", where=str(model_dir), fix="copy it again"
        ) from error
    except (OSError, ValueError, RuntimeError) as error:
        raise SwiftFP8Error(
            f"can't load the model: {str(error).splitlines()[0]}", where=str(model_dir)
        ) from error
    task = trained.task if trained is not None else "sft"
    fresh = head_modules(model) if trained is not None and adapter_dir is not None else ()
    missing = [name for name in info["missing_keys"] if not may_be_missing(name, fresh, task)]
    check_loaded({**info, "missing_keys": missing}, model_dir, fresh, whole=False)
    if adapter_dir is not None:
        model = _with_adapter(model, adapter_dir)
    return model.to(device).eval()


def load_chat_tokenizer(*directories: Path | None, trust_remote_code: bool = False) -> Any:
    """The tokenizer of the first directory that has one; it must have a chat template."""
    tokenizer, directory = load_tokenizer(*directories, trust_remote_code=trust_remote_code)
    if not tokenizer.chat_template:
        raise SwiftFP8Error(
            "the tokenizer has no chat template",
            where=str(directory),
            fix="put the model's chat_template.jinja there, or take a run that was trained "
            "with template=<file>",
        )
    return tokenizer


def load_tokenizer(*directories: Path | None, trust_remote_code: bool = False) -> tuple[Any, Path]:
    """The tokenizer of the first directory that has one, and that directory."""
    from transformers import AutoTokenizer

    from swiftfp8.export.files import has_tokenizer

    given = [directory for directory in directories if directory is not None]
    directory = next(filter(has_tokenizer, given), None)
    if directory is None:
        raise SwiftFP8Error(
            "no tokenizer files",
            where=", ".join(map(str, given)),
            fix="copy tokenizer.json and tokenizer_config.json there from the base model",
        )
    try:
        return AutoTokenizer.from_pretrained(
            directory, trust_remote_code=trust_remote_code
        ), directory
    except (OSError, ValueError) as error:
        raise SwiftFP8Error(
            f"the tokenizer can't be read: {str(error).splitlines()[0]}",
            where=str(directory),
            fix="set trust_remote_code=true if it has code of its own that you have read",
        ) from error


def stream_answer(
    model: Any, tokenizer: Any, messages: list[dict[str, str]], sampling: Sampling
) -> Iterator[str]:
    """Pieces of the answer to `messages`, as the model produces them.

    Leaving the iterator early (Ctrl-C) stops the generation.
    """
    import torch
    from transformers import StoppingCriteria, StoppingCriteriaList, TextIteratorStreamer

    thinking = sampling.enable_thinking
    inputs = tokenizer.apply_chat_template(
        messages,
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
        **({} if thinking is None else {"enable_thinking": thinking}),
    ).to(model.device)
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    stop = threading.Event()
    failure: list[BaseException] = []

    class Stopped(StoppingCriteria):  # type: ignore[misc]
        def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
            return torch.full((len(input_ids),), stop.is_set(), device=input_ids.device)

    def generate() -> None:
        try:
            torch.manual_seed(sampling.seed)
            with torch.inference_mode():
                model.generate(
                    **inputs,
                    **generation_options(model, tokenizer, sampling),
                    streamer=streamer,
                    stopping_criteria=StoppingCriteriaList([Stopped()]),
                )
        except BaseException as error:  # handed to the reader below, which raises it
            failure.append(error)
            streamer.end()

    worker = threading.Thread(target=generate, daemon=True)
    worker.start()
    try:
        yield from streamer
    finally:
        stop.set()
        worker.join()
    if failure:
        raise failure[0]


def _answer(
    model: Any,
    tokenizer: Any,
    messages: list[dict[str, str]],
    sampling: Sampling,
    console: Console,
) -> str:
    pieces: list[str] = []
    for piece in stream_answer(model, tokenizer, messages, sampling):
        pieces.append(piece)
        console.print(piece, end="", markup=False, highlight=False, soft_wrap=True)
    console.print()
    return "".join(pieces)


def _converse(
    model: Any,
    tokenizer: Any,
    opening: list[dict[str, str]],
    sampling: Sampling,
    console: Console,
) -> None:
    """Read, answer, remember, until the user leaves. Ctrl-C cuts an answer short."""
    messages = list(opening)
    while True:
        try:
            text = console.input("[bold]> [/bold]").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if text in _EXIT:
            return
        if text == "/reset":
            messages = list(opening)
            console.print("forgotten", style="dim")
        elif text.startswith("/"):
            console.print(_HELP, style="dim")
        elif text:
            messages.append(_user(text))
            try:
                reply = _answer(model, tokenizer, messages, sampling, console)
                messages.append({"role": "assistant", "content": reply})
            except KeyboardInterrupt:
                messages.pop()
                console.print("\n(cut short and forgotten)", style="dim")


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def check_sampling(sampling: Sampling) -> None:
    """Refuse what can't be drawn."""
    if not 0 <= sampling.temperature < math.inf:
        raise SwiftFP8Error("temperature must be finite and not negative", where="temperature")
    if not -(2**63) <= sampling.seed < 2**64:  # what torch takes
        raise SwiftFP8Error("seed must fit into 64 bits", where="seed")
    if not 0 < sampling.top_p <= 1:
        raise SwiftFP8Error("top_p must be above 0 and at most 1", where="top_p")
    if sampling.max_new_tokens < 1:
        raise SwiftFP8Error("max_new_tokens must be at least 1", where="max_new_tokens")


def generation_options(model: Any, tokenizer: Any, sampling: Sampling) -> dict[str, Any]:
    """Options for `generate`; what the model's own file says of sampling is overridden."""
    options: dict[str, Any] = {"max_new_tokens": sampling.max_new_tokens}
    if sampling.temperature > 0:
        options |= {
            "do_sample": True,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": 0,
        }
    else:
        options |= {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    ends = model.generation_config.eos_token_id
    ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
    ends = [*ends, *turn_ends(tokenizer)]
    if tokenizer.eos_token_id is not None:
        ends.append(tokenizer.eos_token_id)
    ends = sorted(set(ends))
    pad = tokenizer.pad_token_id
    options["pad_token_id"] = pad if pad is not None else (ends[0] if ends else None)
    return options | ({"eos_token_id": ends} if ends else {})


def _placement() -> tuple[str, Any]:
    """Device, and the dtype that computes well on it."""
    import torch

    from swiftfp8.hardware import probe

    hardware = probe()
    if hardware.why_not("bf16") is None:
        return hardware.device, torch.bfloat16
    return hardware.device, torch.float16 if hardware.device == "cuda" else torch.float32


def _read_config(model_dir: Path, trust_remote_code: bool) -> tuple[Any, dict[str, Any]]:
    """The configuration, and what `from_pretrained` must be told to dequantize an FP8 export."""
    from transformers import AutoConfig, FineGrainedFP8Config

    try:
        config = AutoConfig.from_pretrained(model_dir, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise SwiftFP8Error(
            f"can't read the model: {str(error).splitlines()[0]}",
            where=str(model_dir),
            fix="give a run, a model directory or an export",
        ) from error
    section = getattr(config, "quantization_config", None)
    if not isinstance(section, dict) or section.get("quant_method") != "fp8":
        return config, {}
    options = FineGrainedFP8Config(
        dequantize=True,
        weight_block_size=section.get("weight_block_size"),
        modules_to_not_convert=section.get("modules_to_not_convert"),
    )
    return config, {"quantization_config": options}


def _is_fp8_without_blocks(config: Any) -> bool:
    """FP8 that transformers reads without its scales, or with a package that may not be there."""
    from swiftfp8.export.layers import is_fp8

    section = getattr(config, "quantization_config", None)
    if not isinstance(section, dict) or not is_fp8(section):
        return False
    return not section.get("weight_block_size")


def _dequantized(model_dir: Path, dtype: Any, trust_remote_code: bool) -> Any:
    """The model that FP8 files stand for, by swiftfp8's own reader."""
    from swiftfp8.export.source import build_model, open_source

    source = open_source(model_dir, trust_remote_code=trust_remote_code)
    weights = ((name, source.merged(name)) for name in source.tensors)
    return build_model(source, weights, dtype=dtype)


def _with_adapter(model: Any, adapter_dir: Path) -> Any:
    from peft import PeftModel, get_peft_model_state_dict
    from safetensors import SafetensorError

    from swiftfp8.models.quiet import quiet_peft

    try:
        with quiet_peft(), warnings.catch_warnings():
            warnings.filterwarnings("error", ".*missing adapter keys", UserWarning)
            model = PeftModel.from_pretrained(model, str(adapter_dir))
    except UserWarning as error:
        raise SwiftFP8Error(
            "the adapter's file lacks weights that adapter_config.json promises: "
            f"{str(error)[:200]}",
            where=str(adapter_dir),
            fix="the two don't belong together, or the file is incomplete; copy the adapter again",
        ) from error
    except SafetensorError as error:
        raise SwiftFP8Error(
            f"the adapter's file is damaged: {error}",
            where=str(adapter_dir / "adapter_model.safetensors"),
            fix="take another checkpoint of the run (checkpoint=last or checkpoint-N), or copy the "
            "file again",
        ) from error
    except (OSError, ValueError, RuntimeError) as error:
        raise SwiftFP8Error(
            f"can't load the adapter: {str(error).splitlines()[0]}",
            where=str(adapter_dir),
            fix="give the base model that it was trained on",
        ) from error
    for name, parameter in get_peft_model_state_dict(model, save_embedding_layers=False).items():
        if not parameter.isfinite().all():
            raise SwiftFP8Error(
                f"the adapter holds NaN or infinity: {name}",
                where=str(adapter_dir),
                fix="take an earlier checkpoint",
            )
    return model
