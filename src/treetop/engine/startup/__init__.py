"""From a configuration to an engine that can run: plan, self-tests, probes, measurements, memory of the worst steps."""
