"""What a checkpoint must do, computed densely, and small random checkpoints: what the doctor compares with."""
