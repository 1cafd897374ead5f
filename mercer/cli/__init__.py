"""The command line: `mercer list | train | compare | layers | convert | align | finetune | eval | bench | ...`.

Nothing here imports torch before a command needs it: `mercer --help` answers at once. What a user wrote wrongly ends in
one line and exit code 2, what went wrong in the world in one line and exit code 1; MERCER_DEBUG=1 shows the traceback.
"""

import errno
import os
import sys
import warnings
from collections.abc import Sequence

from cyclopts import App, CycloptsError, Parameter

from mercer import __version__
from mercer.cli.align import align, kernel_error
from mercer.cli.benches import ops, peers, state
from mercer.cli.classifiers import align_recipe, finetune_recipe, is_classifier
from mercer.cli.convert import convert
from mercer.cli.finetune import finetune
from mercer.cli.layers import layers
from mercer.cli.models import evaluate_model, generate
from mercer.cli.quiet import filter_warnings, silence_libraries
from mercer.cli.studies import study
from mercer.cli.tables import list_names, report
from mercer.cli.training import compare, train

app = App(
    name="mercer",
    version=__version__,
    help_format="markdown",
    suppress_keyboard_interrupt=False,
    default_parameter=Parameter(negative=()),
    help="""Language models whose attention is a kernel regression: train them, compare them, use them.

Start here:

* `mercer list` shows what there is: recipes, corpora, mixers, sizes.
* `mercer train tiny --data.source my_text.txt --model.mixer cubit` trains on a text of yours.
* `mercer compare demo --mixers softmax,deltaformer,cubit --seeds 3` trains all three, prints a table, writes a report.
* `mercer generate runs/tiny-cubit-s0 --prompt "Once"` continues a text.
""",
)
_SETTINGS = "RECIPE [--KEY VALUE ...] [OPTIONS]"
app.command(list_names, name="list")
app.command(train, usage=f"mercer train {_SETTINGS}")
app.command(compare, usage=f"mercer compare {_SETTINGS}")
app.command(layers)
app.command(convert)
app.command(align)
app.command(finetune, usage="mercer finetune DIR [--KEY VALUE ...] [OPTIONS]")
app.command(align_recipe, name="align-classifier", show=False, usage=f"mercer align {_SETTINGS}")
app.command(finetune_recipe, name="finetune-classifier", show=False, usage=f"mercer finetune {_SETTINGS}")
app.command(kernel_error)
app.command(generate)
app.command(evaluate_model, name="eval")
app.command(report)
bench = App(name="bench", help="Time and memory beside PyTorch's own attention, and beside other packages'.")
bench.command(ops)
bench.command(state)
bench.command(peers)
app.command(bench)
app.command(study)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    silence_libraries()
    try:
        with warnings.catch_warnings():
            filter_warnings()
            words = sys.argv[1:] if arguments is None else list(arguments)
            code = app(_route(words), exit_on_error=False, print_error=False, result_action="return_value")
        if "RANK" in os.environ:
            from mercer.train.distribution import leave

            leave()
        return code if isinstance(code, int) else 0
    except KeyboardInterrupt:
        return _say("interrupted", 130)
    except (CycloptsError, ValueError, FileNotFoundError, FileExistsError, NotADirectoryError) as error:
        return _say(error, 2)
    except ModuleNotFoundError as error:
        return _say(_missing(error), 1)
    except (RuntimeError, ArithmeticError, OSError, ImportError, MemoryError) as error:
        return _say(error, 1)


def _route(words: list[str]) -> list[str]:
    """Send `align` and `finetune`, which take a folder, to the command with other options where a recipe is named."""
    if len(words) > 1 and words[0] in ("align", "finetune") and is_classifier(words[1]):
        return [f"{words[0]}-classifier", *words[1:]]
    return words


def _say(error: BaseException | str, code: int) -> int:
    if os.environ.get("MERCER_DEBUG") == "1" and isinstance(error, BaseException):
        raise error
    if os.environ.get("RANK", "0") == "0":  # under torchrun one process speaks
        lines = str(error).strip().splitlines() or [type(error).__name__]
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            lines[0] += "; make room, then give the same command with --resume"
        text = " ".join(line.strip() for line in lines) if isinstance(error, CycloptsError) else lines[0]
        print(f"error: {text}", file=sys.stderr)
    return code


_EXTRAS = {
    "hf": ("transformers", "tokenizers", "gguf", "accelerate"),
    "data": ("datasets", "pyarrow"),
    "plots": ("matplotlib",),
    "particles": ("sklearn", "scipy", "ot"),
    "eval": ("lm_eval",),
    "lora": ("peft",),
    "peers": ("darkformer_pytorch", "performer_pytorch"),
}


def _missing(error: ModuleNotFoundError) -> str:
    """Say which extra brings a package that is not there."""
    extra = next((extra for extra, packages in _EXTRAS.items() if (error.name or "").split(".")[0] in packages), "all")
    return f"this command needs the package {error.name}: pip install 'mercer[{extra}]'"
