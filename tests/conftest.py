"""Puts tests/ itself on the import path, for the helper modules beside this file."""
