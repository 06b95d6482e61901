"""Prefill and decode workers: what each does beside its core to hand requests over."""
