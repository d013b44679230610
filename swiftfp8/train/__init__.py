"""The training stage, on transformers.Trainer."""
