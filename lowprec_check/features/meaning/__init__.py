"""Judges outputs by what they mean: tokens, classes, boxes, masks, pictures."""
