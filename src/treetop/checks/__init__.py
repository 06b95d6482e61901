"""Guards. Level 1 is host arithmetic on what the host already holds, and is on by default."""
