"""Ranks, a process each: worker groups, which share every layer, and groups whose ranks share experts, in lockstep."""
