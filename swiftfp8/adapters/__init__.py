"""LoRA on any precision's linear."""
