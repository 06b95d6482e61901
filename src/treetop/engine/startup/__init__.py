"""From a configuration to an engine that can run: plan, proofs, probes, measurements, memory of the worst steps."""
