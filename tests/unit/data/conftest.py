import pytest

from swiftfp8.config.paths import assets_dir


@pytest.fixture(scope="session")
def plain_tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(assets_dir() / "tiny")


@pytest.fixture
def tokenizer(plain_tokenizer):
    """The embedded tokenizer; tests may give it another template."""
    template = plain_tokenizer.chat_template
    yield plain_tokenizer
    plain_tokenizer.chat_template = template
