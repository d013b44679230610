"""Rows of any common format, tokenized with a loss mask."""
