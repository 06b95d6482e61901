"""K/V beside the device: pages on the host and their copies, pinned memory, pages on disk."""
