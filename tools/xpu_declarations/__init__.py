"""What torch's and Intel's sources declare for XPU, made into `catalog/declared-xpu-*.json`. See docs/declared-xpu.md."""
