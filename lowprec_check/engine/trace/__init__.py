"""The instrumented part of a run: every op call, recorded and compared."""
