"""Prefill and decode in workers of their own: one state machine a side, messages, transports. No tensors."""
