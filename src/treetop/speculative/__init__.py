"""The round: grow a tree, verify it in one target forward, accept the path the target itself would take."""
