"""Precision backends: one file each, found by name. See `backend.py` for what a file must offer."""
