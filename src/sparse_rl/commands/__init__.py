"""One module per command: `add_arguments(parser)` and `run(args)`. Modules import torch only when they run."""
