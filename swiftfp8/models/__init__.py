"""Model families, sources and loading."""
