"""Which request runs when: admission, chunked prefill, rounds, retraction, stops. Host code without tensors."""
