"""Whether a row has the same bits in any company: one frame for all probes."""
