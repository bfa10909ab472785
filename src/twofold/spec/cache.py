"""What a cache and the formula of its size must agree on."""

RECENT_TOKENS = 32
"""Latest tokens that an int4 cache holds as float32 too: errors in the nearest keys do most of the damage, and 32
tokens take little memory (docs/log.md has the figures for 8 to 128)."""
