"""Renderers: ``render(result) -> str``, from a saved result alone. Never import torch."""
