"""What every floor speaks of: ids, errors, parameters, configuration, capacity, messages. No tensors are made here."""
