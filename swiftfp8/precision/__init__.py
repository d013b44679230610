"""Precision backends: one file each, found by name; `_backend.py` says what a file must offer."""
