"""What a run shows: tables and plots."""
