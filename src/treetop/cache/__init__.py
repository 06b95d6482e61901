"""Who owns which page: pools, allocators, leases, and the cache of prefixes."""
