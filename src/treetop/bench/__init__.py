"""`treetop bench`: plain against speculative decoding, and rounds by phase against the machine's own floor."""
