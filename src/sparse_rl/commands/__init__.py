"""The commands, one module each with `add_arguments(parser)` and `run(args)`. A module imports torch only in `run`."""
