"""`mercer study`."""

from pathlib import Path

from cyclopts import App

from mercer.cli.benches import whole_numbers

study = App(name="study", help="Experiments with a question, a verdict and one page: mercer study synthetic.")


@study.command
def synthetic(
    *,
    trials: int = 10,
    first_trial: int = 0,
    budget: float = 30.0,
    jobs: int = 2,
    parts: str = "noise,retention,ablation,time",
    methods: str | None = None,
    noise_levels: str | None = None,
    features: str = "16,32,64,128,256",
    repulsions: str = "0,0.02,0.05,0.1,0.2,0.5,1",
    samples: str = "200,400,800,1600",
    out: Path = Path("runs/study-synthetic"),
    resume: bool = False,
    overwrite: bool = False,
) -> int:
    """Ask whether features learned from labels beat fixed ones under label noise: `mercer study synthetic`.

    A task with a known signal (10 inputs, 280 training samples) is drawn anew for every trial, at ten levels of noise.
    Learned particles meet their own untrained start, fixed and importance-sampled Fourier features, kernel machines,
    logistic regression and the majority class, all on the same draws. Every gain comes with a standard error over the
    trials, and one inside two of them is called within noise.

    **Examples**

    ```
    mercer study synthetic
    mercer study synthetic --budget 5 --trials 3
    mercer study synthetic --parts noise --noise-levels 0.01,1 --methods "particles;rbf-svm" --out runs/two-levels
    mercer study synthetic --resume
    ```

    **Parts**

    * `noise`: accuracy of every method at every level, and what the particles gain over each
    * `retention`: what 16 to 256 features keep of the accuracy above chance, at the lowest level
    * `ablation`: strengths of the repulsion between particles, none included, at the lowest level
    * `time`: time of fit against the number of samples, and its exponent

    Writes report.html, tables.md, figures/, trials.jsonl and study.json. Ctrl-C keeps every finished trial and prints
    the command to go on. The whole takes about 15 minutes on two idle cores.

    Args:
        trials: draws of the task; standard errors are over them, so at least 3.
        first_trial: seed of the first, the others follow.
        budget: minutes in all; what does not fit is left out, and the page says what.
        jobs: trials at a time, one process and one thread each.
        parts: what to run, separated by commas.
        methods: names separated by semicolons, as some have a comma; all but the paper's own settings by default.
        noise_levels: standard deviations, separated by commas; ten from 1e-5 to 1e5 by default.
        features: numbers of features, for retention.
        repulsions: strengths, for ablation.
        samples: sizes of the whole sample, of which 70 % train, for time.
        out: the folder.
        resume: go on with the trials in the folder.
        overwrite: forget the trials in the folder.
    """
    from mercer.study.synthetic import Settings, run_synthetic
    from mercer.study.synthetic.design import METHODS, NOISE_LEVELS

    settings = Settings(
        methods=METHODS if methods is None else tuple(name.strip() for name in methods.split(";")),
        noise_levels=NOISE_LEVELS if noise_levels is None else numbers("noise-levels", noise_levels),
        budgets=tuple(whole_numbers("features", features)),
        strengths=numbers("repulsions", repulsions),
        samples=tuple(whole_numbers("samples", samples)),
        parts=tuple(name.strip() for name in parts.split(",")),
    )
    run_synthetic(
        settings,
        out,
        seeds=range(first_trial, first_trial + trials),
        budget_minutes=budget,
        jobs=jobs,
        resume=resume,
        overwrite=overwrite,
    )
    return 0


@study.command
def darkformer(
    model: str,
    /,
    *,
    source: str = "python-docs",
    layers: str = "all",
    steps: int = 24,
    length: int = 256,
    learning_rate: float = 1e-4,
    num_features: int = 128,
    align_steps: int = 24,
    windows: int = 4,
    seeds: int = 1,
    first_seed: int = 0,
    budget: float = 40.0,
    jobs: int = 1,
    threads: int | None = None,
    parts: str = "methods,full,features,rates",
    methods: str | None = None,
    features: str = "64,128,256",
    rates: str = "3e-5,1e-4,3e-4,1e-3,3e-3,1e-2,3e-2",
    distances: str = "32,192",
    out: Path = Path("runs/study-darkformer"),
    resume: bool = False,
    overwrite: bool = False,
) -> int:
    """Ask what a pretrained model loses with other attention, and wins back by finetuning: `mercer study darkformer`.

    Exact softmax, DARKFormer (as it is, whitened, with a near field, aligned and taught), Performer, LFK, a window
    alone, the plain average and random weights take the attention's place in the same model and are finetuned for the
    same steps on the same text. Held-out loss and next-token accuracy on the way, and recall of a number that lies
    beyond the window.

    **Examples**

    ```
    mercer study darkformer SmolLM2-135M-Instruct.Q4_1.gguf
    mercer study darkformer my_llama --source my_text.jsonl --steps 200 --seeds 3 --budget 600
    mercer study darkformer my_gemma --layers global --parts methods --methods "softmax;window;darkformer, near"
    mercer study darkformer my_llama --resume
    ```

    **Parts**

    * `methods`: q, k, v and the mixers' own parameters learn, as in the paper's partial finetuning
    * `full`: all parameters learn
    * `features`: DARKFormer and Performer by number of features
    * `rates`: DARKFormer and Performer under seven learning rates, with the number of loss spikes

    Writes report.html, tables.md, figures/, trials.jsonl and study.json. Ctrl-C keeps every finished trial and prints
    the command to go on.

    Args:
        model: a folder of transformers, a GGUF file, or a hub name.
        source: text to finetune and measure on: a corpus, a path or hf:NAME.
        layers: all, global (those with full attention), or numbers as 3,5,7.
        steps: of finetuning, of one window each; a multiple of 4.
        length: tokens in a window.
        learning_rate: its peak, in all parts but rates.
        num_features: features of a head, in all parts but features.
        align_steps: of attention transfer, for the method that is aligned.
        windows: held-out windows.
        seeds: how many; a standard error needs 3.
        first_seed: the others follow.
        budget: minutes in all; what does not fit is left out, and the page says what.
        jobs: trials at a time, a process each; every one holds the model up to three times.
        threads: CPU threads of each.
        parts: what to run, separated by commas.
        methods: names separated by semicolons, as some have a comma.
        features: numbers of features, for features.
        rates: learning rates, for rates.
        distances: tokens between a number and its recall.
        out: the folder.
        resume: go on with the trials in the folder.
        overwrite: forget the trials in the folder.
    """
    from mercer.hf.source import find_source

    find_source(model)
    from mercer.study.darkformer import Settings, run_darkformer
    from mercer.study.darkformer.design import METHODS

    settings = Settings(
        model=model,
        source=source,
        layers=layers,
        methods=tuple(METHODS) if methods is None else tuple(name.strip() for name in methods.split(";")),
        parts=tuple(name.strip() for name in parts.split(",")),
        steps=steps,
        length=length,
        learning_rate=learning_rate,
        num_features=num_features,
        features=tuple(whole_numbers("features", features)),
        rates=numbers("rates", rates),
        align_steps=align_steps,
        windows=windows,
        distances=tuple(whole_numbers("distances", distances)),
    )
    run_darkformer(
        settings,
        out,
        seeds=range(first_seed, first_seed + seeds),
        budget_minutes=budget,
        jobs=jobs,
        threads=threads,
        resume=resume,
        overwrite=overwrite,
    )
    return 0


def numbers(option: str, text: str) -> tuple[float, ...]:
    """Read numbers separated by commas.

    >>> numbers("noise-levels", "1e-5, 1")
    (1e-05, 1.0)
    """
    try:
        return tuple(float(word) for word in text.split(","))
    except ValueError:
        raise ValueError(f"{option} ({text!r}) must be numbers separated by commas, as 0.01,1") from None
