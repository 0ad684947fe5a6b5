"""The typed config: every knob with its type, unit, bounds and help. `validate` turns YAML into it."""
