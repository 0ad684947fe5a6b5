"""The simulator's own studies: what no engine can be asked. ``make`` makes the one that a config describes."""
