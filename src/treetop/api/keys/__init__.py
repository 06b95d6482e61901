"""Who may ask: API keys, their limits, and what they have used."""
