"""What a scan does besides: a folder each, which the core finds by itself and never names."""
