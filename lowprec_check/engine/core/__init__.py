"""What the other rooms of the engine stand on: comparing tensors, nested containers, dispatch modes, source lines."""
