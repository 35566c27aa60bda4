"""Post-training static quantization to int8, by the library that fits the installed torch."""
