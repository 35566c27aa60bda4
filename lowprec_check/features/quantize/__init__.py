"""Rows in eight and four bits: linear layers and convolutions that are quantized."""
