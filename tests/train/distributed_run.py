"""Started by torchrun in test_distribution.py: train as asked, in every process; the first one writes."""

import json
import sys
from pathlib import Path

import torch

from mercer.train import config, distribution, loop

torch.set_num_threads(1)
jobs = json.loads(Path(sys.argv[1]).read_text())
for job in jobs:
    recipe = config.from_dict(job["recipe"])
    stop = job.get("stop")
    loop.train(
        recipe, Path(job["out"]), resume=job.get("resume", False), should_stop=lambda step, stop=stop: step == stop
    )
distribution.leave()
