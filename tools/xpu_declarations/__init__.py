"""What torch's and Intel's sources declare for XPU, made into `catalog/declared-xpu.jsonl`. See docs/declared-xpu.md."""
