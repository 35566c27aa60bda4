"""Builds `catalog/declared-xpu.jsonl` from the source code of torch and Intel. See docs/declared-xpu.md."""
