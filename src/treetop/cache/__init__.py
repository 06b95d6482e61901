"""Who owns which page: pools, allocators, leases, and the radix cache of finished prefixes."""
