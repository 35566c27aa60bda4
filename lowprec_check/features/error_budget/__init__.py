"""Where the error of an output comes from, by following each op's error to it."""
