"""The text study: what it varies, what it says of made-up trials, and small runs of trial and command."""

import json
import math
import random
from dataclasses import replace

import numpy as np
import pytest

from mercer.cli import main
from mercer.evaluate import reliability
from mercer.report.style import LIGHT
from mercer.study import Trial
from mercer.study.text import Settings, figures, tables
from mercer.study.text.design import MAPS, SIZES, Size, check, conditions, sized
from mercer.study.text.trial import SCORES, trial

TINY = Size(16, 1, 2, 16, 8, 12, "byte", 128, 1, 8, 1e-2, batch_size=16)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Return a file of texts that say which of two classes they are of, in one of their words."""
    draw, rows = random.Random(0), ["text\tlabel"]
    for number in range(240):
        label = draw.choice(("fruit", "metal"))
        said = draw.choice({"fruit": ("fig", "plum"), "metal": ("tin", "zinc")}[label])
        rows.append(f"{said} of {number}\t{label}")
    file = tmp_path_factory.mktemp("texts") / "texts.tsv"
    file.write_text("\n".join(rows) + "\n")
    return file


def settings(source="x", **changes):
    usual = {"size": TINY, "maps": ("softplus", "elu"), "levels": (0.5,), "label_noise": (0.3,)}
    return Settings(str(source), **usual | changes)


def made_up(chosen: Settings) -> list[Trial]:
    """Learned softplus gains a point at every seed, learned elu loses ten at one seed and gains ten at another."""
    trials = []
    for condition in conditions(chosen):
        for seed in range(3):
            accuracy = 0.7 + 0.01 * seed - condition["label_noise"] / 2
            if condition["variant"] == "learned":
                accuracy += 0.01 if condition["method"] == "softplus" else (0.1, 0.0, -0.1)[seed]
            result = dict.fromkeys(SCORES, accuracy) | {"log_loss": 1 - accuracy, "calibration_error": 0.05}
            result |= {"calibration_low": 0.03, "calibration_high": 0.08, "calibrated_error": 0.02, "majority": 0.5}
            result["validation_log_loss"] = 0.5 if condition["method"] == "elu" else 0.6
            result |= {f"{kind}@0.5": accuracy - 0.2 for kind in ("drop", "typos")}
            result["bins"] = [[0, 0.0, 0.0], [10 * (seed + 1), 0.6, 0.3 * seed]]
            if condition["align"]:
                result |= {"alignment_before": 1.7, "alignment_after": 1.71, "moved": 0.3, "outside": 0.25}
                result |= {"drift_step": 1e-6, "noise_step": 0.01 if condition["variant"] == "learned" else 1e-7}
            trials.append(Trial(condition, seed, 1.0, result))
    return trials


def test_conditions_pair_vanilla_with_learned_and_end_with_the_sharp_ones():
    found = conditions(Settings())
    assert len({json.dumps(c, sort_keys=True) for c in found}) == len(found) == 2 + 2 * 7 + 2 * 3 + 7
    clean = [(c["method"], c["variant"]) for c in found if not c["label_noise"]]
    assert clean[:4] == [
        ("softmax", "exact"),
        ("performer", "vanilla"),
        ("softplus", "vanilla"),
        ("softplus", "learned"),
    ]
    assert [case[1] for case in clean[-7:]] == ["sharp"] * 7
    learned = next(c for c in found if c["variant"] == "learned")["align"]
    assert (learned["kind"], learned["inverse_temperature"], learned["step_size"]) == ("within_class", 50.0, 2e-3)
    for changed, message in (
        ({"maps": ("softpluss",)}, r"unknown map 'softpluss'; .*did you mean 'softplus'"),
        ({"variants": ("learned",)}, "variants without vanilla"),
        ({"parts": ("method",)}, "unknown part 'method'"),
        ({"levels": (0.0,)}, r"levels \(\(0.0,\)\) must lie above 0"),
        ({"sharp_kind": "centred"}, "unknown kind of alignment 'centred'"),
        ({"size": sized("small", texts=3)}, r"texts \(3\) must be at least 64"),
    ):
        with pytest.raises(ValueError, match=message):
            check(Settings(**changed), range(3))
    with pytest.raises(ValueError, match="no seeds; ask for at least 3"):
        check(Settings(), range(0))
    with pytest.raises(ValueError, match="unknown size 'huge'"):
        sized("huge")


def test_tables_say_what_the_trials_say():
    chosen = settings()
    trials = made_up(chosen)
    scores = {tuple(row[:2]): row[2:] for row in tables.methods_table(trials, chosen).rows}
    assert scores["softplus", "learned"][0] == "72.0 ± 0.6"
    assert scores["softmax", "exact"][4:7] == ["0.050 ± 0.000", "0.030 to 0.080", "0.020"]
    gains = {tuple(row[:2]): row[2:] for row in tables.gains_table(trials, chosen).rows}
    assert gains["softplus", "learned"][0] == "+1.0 ± 0.0 better"
    assert gains["softplus", "learned"][2] == "-0.010 ± 0.000 better"  # of a loss, lower is better
    assert gains["elu", "learned"][0] == "+0.0 ± 5.8 within noise"
    assert gains["mean of the maps", "learned"][0] == "+0.5 ± 2.9 within noise"
    beside = {tuple(row[:2]): row[2:] for row in tables.softmax_table(trials, chosen).rows}
    assert beside["softplus", "learned"][0] == "+1.0 ± 0.0 better"
    assert ("softmax", "exact") not in beside
    phase = {tuple(row[:2]): row[2:] for row in tables.phase_table(trials, chosen).rows}
    assert phase["elu", "learned"][:3] == ["1.0e-06", "1.0e-02", "1e+04"]
    assert phase["elu", "learned"][-1] == "25 %"
    damage = {tuple(row[:3]): row[3:] for row in tables.robustness_table(trials, chosen).rows}
    assert damage["words left out", "softmax", "exact"] == ["71.0 ± 0.6", "-", "51.0 ± 0.6"]
    assert damage["wrong training labels", "softplus", "learned"] == ["72.0 ± 0.6", "57.0 ± 0.6", "-"]
    assert ("words left out", "elu", "learned") in damage  # the least validation log loss
    said = " ".join(tables.findings(trials, chosen))
    assert "learned minus vanilla, mean of 2 maps: accuracy +0.5 ± 2.9 points, within noise" in said
    assert "the noise moves a particle 1e+04 to 1e+04 times as far" in said
    assert tables.findings([], chosen) == []


def test_figures_are_drawn_of_pooled_bins():
    chosen = settings()
    trials = made_up(chosen)
    found = figures.figures(trials, chosen)
    assert [figure.name for figure in found] == ["reliability", "drop", "typos", "label_noise"]
    assert found[3].render(LIGHT, "png").startswith(b"\x89PNG")
    assert figures.figures([], chosen) == []
    draw = np.random.default_rng(0)
    parts = [(draw.dirichlet((1, 1, 1), 50), draw.integers(3, size=50)) for _ in range(3)]
    shared = {"method": "elu", "variant": "vanilla", "label_noise": 0.0}
    each = [reliability(*part) for part in parts]
    rows = [np.nan_to_num(np.stack([r.count, r.confidence, r.accuracy], 1)).tolist() for r in each]
    pooled = figures.pooled([Trial(shared, s, 1.0, {"bins": bins}) for s, bins in enumerate(rows)], "elu", "vanilla")
    whole = reliability(*map(np.concatenate, zip(*parts, strict=True)))
    assert pooled is not None
    np.testing.assert_array_equal(pooled.count, whole.count)
    np.testing.assert_allclose(pooled.accuracy, whole.accuracy)
    np.testing.assert_allclose(pooled.confidence, whole.confidence)


def test_a_trial_learns_and_its_pair_differs_in_the_particles_alone(texts):
    chosen = settings(texts, parts=("methods",), maps=("softplus",), sharp_step_size=1.0)
    found = {(c["method"], c["variant"]): trial(seed=3, **c) for c in conditions(chosen)}
    for result in found.values():
        assert all(math.isfinite(value) for name, value in result.items() if name != "bins")
        assert result["accuracy"] > result["majority"]
        assert {"drop@0.5", "typos@0.5", "calibration_low"} < set(result)
    vanilla, learned = found["softplus", "vanilla"], found["softplus", "learned"]
    assert vanilla["log_loss"] != learned["log_loss"]
    assert "moved" not in vanilla
    assert learned["noise_step"] == pytest.approx(math.sqrt(2 * 2e-3 / 50 * 8))
    assert learned["drift_step"] < learned["noise_step"] < learned["moved"]
    again = next(c for c in conditions(chosen) if c["variant"] == "learned")
    assert trial(seed=3, **again) == learned
    still = again | {"align": again["align"] | {"step_size": 1e-30}}  # particles that stay: vanilla to the bit
    assert trial(seed=3, **still)["log_loss"] == vanilla["log_loss"]
    noisy = trial(seed=3, **again | {"label_noise": 0.45})
    assert noisy["log_loss"] > learned["log_loss"]


def test_the_command(texts, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(SIZES, "small", replace(TINY, texts=32, epochs=1))
    words = ["study", "text", "--source", str(texts), "--maps", "softplus,favor", "--variants", "vanilla,learned"]
    words += ["--seeds", "2", "--levels", "0.5", "--label-noise", "0.3", "--jobs", "1", "--out", str(tmp_path / "s")]
    assert main(words) == 0
    said = capsys.readouterr().out
    for part in ("Scores on the test texts", "Learned minus vanilla", "What phase A does", "under damage", "written:"):
        assert part in said
    assert len((tmp_path / "s" / "trials.jsonl").read_text().splitlines()) == 2 * (2 + 4 + 3)
    text = (tmp_path / "s" / "tables.md").read_text()
    assert "| favor | learned |" in text
    assert (tmp_path / "s" / "figures" / "reliability.png").exists()
    assert main(["study", "text", "--maps", "softpluss"]) == 2
    assert "unknown map 'softpluss'" in capsys.readouterr().err
    assert set(MAPS) >= {"favor", "porf_softplus"}
