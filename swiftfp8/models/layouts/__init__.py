"""Checkpoint layouts that need code."""
