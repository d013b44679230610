"""config → plan → load → inject → train → export, and nothing else."""
