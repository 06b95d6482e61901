"""What leaves the GPU: exchanges between the GPUs of a host, and KV chunks on their way to a worker."""
