"""LP5xx: what training in low precision does to gradients, updates and the loss."""

from lowprec_check.features.training.rules import backward, divergence, updates

__all__ = ["backward", "divergence", "updates"]
