"""Fine-tune large language models in FP8, and export checkpoints that inference engines load."""

__version__ = "0.1.0"
