"""The formats of a report, one module each with a ``FORMAT``; what renders is imported when it is needed."""
