"""A real pretrained model through GGUF conversion: is it still the model that it was?"""

from __future__ import annotations

import pytest
import torch
from real_models import gemma3_270m_gguf

from swiftfp8.config.schema import Config
from swiftfp8.models.load import load_meta, load_model, load_tokenizer
from swiftfp8.models.source import resolve_source

TEXT = (
    "The Apollo program was the United States human spaceflight program led by NASA, which landed "
    "the first humans on the Moon in 1969. It was conceived during Project Mercury and executed "
    "after Project Gemini."
)


@pytest.mark.real
@pytest.mark.timeout(600)
def test_gemma3_from_gguf_speaks_english() -> None:
    source = resolve_source(Config(model=str(gemma3_270m_gguf()), model_type="gemma3"))
    meta = load_meta(source, Config())
    assert len([linear for linear in meta.linears if linear.kind == "linear"]) == 126
    assert meta.tied_head

    model, tokenizer = load_model(source, "fp32"), load_tokenizer(source)
    with torch.no_grad():
        ids = tokenizer(TEXT, return_tensors="pt").input_ids
        # about 9 where weights and tokenizer are right; a wrong norm or tokenizer gives thousands
        assert model(ids, labels=ids).loss.exp() < 15
        prompt = tokenizer("The Apollo program landed the first humans on", return_tensors="pt")
        answer = model.generate(**prompt, max_new_tokens=8, do_sample=False)
    assert "moon" in tokenizer.decode(answer[0]).lower()
