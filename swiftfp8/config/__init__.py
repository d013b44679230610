"""YAML and overrides to one validated Config."""
