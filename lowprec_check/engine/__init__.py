"""What runs a model, or an operator, without a scan: loading, casting, backends, sweeps."""
