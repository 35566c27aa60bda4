"""Predicts the output errors of formats that are not run."""
