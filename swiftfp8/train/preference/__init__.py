"""Losses of `task=dpo`, one file each: `NAME`, `losses`, and `rewards` where they aren't DPO's."""
