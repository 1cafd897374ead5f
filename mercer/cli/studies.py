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
    keep: str = "",
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
    same steps on the same text; with --keep hybrids too, in which some layers keep their softmax. Held-out loss and
    next-token accuracy on the way, and recall of a number that lies beyond the window.

    **Examples**

    ```
    mercer study darkformer SmolLM2-135M-Instruct.Q4_1.gguf
    mercer study darkformer my_llama --source my_text.jsonl --steps 200 --seeds 3 --budget 600
    mercer study darkformer my_gemma --layers global --parts methods --methods "softmax;window;darkformer, near"
    mercer study darkformer my_llama --keep 18,20,23 --parts methods
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
        keep: layers that keep their softmax in the hybrid methods, which need some; `mercer layers` finds them.
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

    settings = Settings(
        model=model,
        source=source,
        layers=layers,
        keep=tuple(whole_numbers("keep", keep)) if keep else (),
        methods=None if methods is None else tuple(name.strip() for name in methods.split(";")),
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


@study.command
def text(
    *,
    source: str = "python-docstrings",
    text_column: str | None = None,
    pair_column: str | None = None,
    label_column: str | None = None,
    size: str = "small",
    texts: int | None = None,
    epochs: int | None = None,
    maps: str = "softplus,favor,elu,sigmoid2,softmaxfeat,cos2,porf_softplus",
    variants: str = "vanilla,learned,sharp",
    parts: str = "methods,robustness",
    levels: str = "0.1,0.2,0.4",
    label_noise: str = "0.2,0.4",
    noise_map: str | None = None,
    align_kind: str = "centered",
    inverse_temperature: float | None = None,
    step_size: float | None = None,
    repulsion: float | None = None,
    seeds: int = 3,
    first_seed: int = 0,
    budget: float = 30.0,
    jobs: int = 2,
    out: Path = Path("runs/study-text"),
    resume: bool = False,
    overwrite: bool = False,
) -> int:
    """Ask whether classifiers of texts gain from particles learned from labels: `mercer study text`.

    Seven feature maps with random ("vanilla") and with learned particles, beside softmax attention and Performer, in
    the same small BERT, on the same texts. Accuracy, MCC, log loss, Brier, calibration error with bootstrap intervals,
    AUC; learned minus vanilla paired by seed, and a difference inside two standard errors is called within noise.

    **Examples**

    ```
    mercer study text
    mercer study text --source reviews.tsv --seeds 5 --budget 60
    mercer study text --source hf:glue/sst2 --size paper --budget 2000
    mercer study text --maps softplus,elu --parts methods --align-kind within_class --inverse-temperature 1e6
    mercer study text --resume
    ```

    **Variants**

    * `vanilla`: the particles stay random (phase B alone)
    * `learned`: phase A with the paper's settings, then phase B
    * `sharp`: phase A with `--align-kind`, `--inverse-temperature`, `--step-size`, `--repulsion`, then phase B

    **Parts**

    * `methods`: all scores, learned minus vanilla, what phase A did to the particles, reliability
    * `robustness`: accuracy with lost words, typing errors, and wrong labels in training

    Writes report.html, tables.md, figures/, trials.jsonl and study.json. Ctrl-C keeps every finished trial and prints
    the command to go on. `--size paper` has the paper's 2 layers, width 128, 256 features, length 128 and 10 epochs of
    each phase; that takes hours.

    Args:
        source: labelled text: python-docstrings, a .tsv, .csv, .jsonl or .parquet file, a folder or hf:NAME.
        text_column: the column with the text; guessed from its name, as the next two.
        pair_column: the column with the second text of a pair.
        label_column: the column with the class.
        size: small or paper.
        texts: training texts, drawn for each seed; 0: all.
        epochs: of phase B.
        maps: feature maps, separated by commas.
        variants: of the particles, separated by commas.
        parts: what to run, separated by commas.
        levels: shares of damaged words.
        label_noise: shares of wrong training labels.
        noise_map: the map that is trained under wrong labels; the first of maps by default.
        align_kind: within_class, centered or signed, of sharp.
        inverse_temperature: of sharp; the noise of a step is sqrt(2 step_size / inverse_temperature).
        step_size: of sharp.
        repulsion: strength, of sharp.
        seeds: how many; a standard error needs 3.
        first_seed: the others follow.
        budget: minutes in all; what does not fit is left out, and the page says what.
        jobs: trials at a time, one process and one thread each.
        out: the folder.
        resume: go on with the trials in the folder.
        overwrite: forget the trials in the folder.
    """
    from mercer.study.text import Settings, run_text, sized

    sharp = {
        "sharp_inverse_temperature": inverse_temperature,
        "sharp_step_size": step_size,
        "sharp_strength": repulsion,
    }
    settings = Settings(
        source=source,
        text=text_column,
        pair=pair_column,
        label=label_column,
        size=sized(size, texts, epochs),
        maps=tuple(name.strip() for name in maps.split(",")),
        variants=tuple(name.strip() for name in variants.split(",")),
        parts=tuple(name.strip() for name in parts.split(",")),
        levels=numbers("levels", levels),
        label_noise=numbers("label-noise", label_noise),
        noise_map=noise_map or maps.split(",")[0].strip(),
        sharp_kind=align_kind,
        **{name: value for name, value in sharp.items() if value is not None},
    )
    run_text(
        settings,
        out,
        seeds=range(first_seed, first_seed + seeds),
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
