"""Training: forward, loss, backward and optimizer, in each way to update the weights."""
