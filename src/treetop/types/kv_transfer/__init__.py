"""What prefill and decode workers, schedulers and engines tell each other of K/V on their way."""
