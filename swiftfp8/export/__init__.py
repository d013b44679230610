"""Merge, quantize, write, verify."""
