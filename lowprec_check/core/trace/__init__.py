"""The instrumented part of a run: records every op call and compares it with a reference."""
