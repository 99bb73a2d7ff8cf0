"""`python -m torch.distributed.run … tests/ranks.py COMMANDS.json`: commands of sparse-rl, one after the other, on every rank."""

import json
import sys
from pathlib import Path

import torch.distributed as dist

from sparse_rl.cli import main

dist.init_process_group("gloo")  # once for all of them, as Ray does
for command in json.loads(Path(sys.argv[1]).read_text()):
    main(command)
dist.destroy_process_group()
