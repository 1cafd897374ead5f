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


def numbers(option: str, text: str) -> tuple[float, ...]:
    """Read numbers separated by commas.

    >>> numbers("noise-levels", "1e-5, 1")
    (1e-05, 1.0)
    """
    try:
        return tuple(float(word) for word in text.split(","))
    except ValueError:
        raise ValueError(f"{option} ({text!r}) must be numbers separated by commas, as 0.01,1") from None
