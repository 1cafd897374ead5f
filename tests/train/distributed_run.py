"""Started by torchrun in test_distribution.py: train as asked, in every process; the first one writes."""

import json
import sys
from pathlib import Path

import torch

from mercer.train import config, distribution, loop


def main(file: str) -> None:
    torch.set_num_threads(1)
    for job in json.loads(Path(file).read_text()):
        stop = job.get("stop")
        recipe = config.from_dict(job["recipe"])
        loop.train(recipe, Path(job["out"]), should_stop=lambda step, stop=stop: step == stop)
    distribution.leave()


if __name__ == "__main__":
    main(sys.argv[1])
