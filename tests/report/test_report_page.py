"""The page: whole in one file, parseable, every string escaped, nothing hidden."""

import math
import re
import sys
from html.parser import HTMLParser

import matplotlib.pyplot as plt
import pytest

from mercer.report import write_report
from mercer.report.figures import group_figures
from mercer.report.groups import group_runs
from mercer.report.style import _COLORS as COLORS
from mercer.report.style import DARK, LIGHT, line_for, pyplot

VOID = {"meta", "img", "source", "br", "link", "hr", "input"}


class Page(HTMLParser):
    """Collects tags and text, and fails where elements do not nest."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.words = [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self):
        return re.sub(r"\s+", " ", " ".join(self.words))

    def all(self, name):
        return [attributes for tag, attributes in self.tags if tag == name]


def written(runs, folder, **options):
    return Page(write_report(runs, folder, **options).read_text(encoding="utf-8"))


def test_page_says_what_was_done_and_what_came_out(three_mixers, tmp_path):
    page = written(three_mixers, tmp_path / "new" / "folder")
    for part in (
        "softmax, cubit and deltaformer were trained with the recipe demo on python-source: 819 k tokens a run",
        "3 seeds finished for each, on cpu, 2 threads",
        "cubit , better : validation loss 2.1000 nats per token, 0.0200 below softmax",
        "deltaformer , within noise :",
        "mercer compare demo --mixers softmax,cubit --seeds 3",
        "torch 2.13.0+cpu",
        "0123abc",
    ):
        assert part in page.text
    assert (tmp_path / "new/folder/table.md").read_text(encoding="utf-8").count("\n| ") == 5
    names = {path.name for path in (tmp_path / "new/folder/figures").iterdir()}
    assert names == {"gap.png", "loss.png", "position.png"}


def test_page_needs_nothing_from_outside_and_is_accessible(three_mixers, tmp_path):
    page = written(three_mixers, tmp_path)
    assert page.all("link") == page.all("script") == page.all("iframe") == []
    for _, attributes in page.tags:
        for name in ("src", "href", "srcset", "action"):
            assert (attributes.get(name) or "data:").startswith("data:image/svg+xml;base64,"[: len("data:")])
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "url(" not in text
    assert "@import" not in text
    assert len(page.all("img")) == 3
    assert all(len(image["alt"]) > 40 for image in page.all("img"))
    assert page.all("html")[0]["lang"] == "en"
    assert page.all("meta")[1]["name"] == "viewport"
    assert all(header.get("scope") in ("col", "row") for header in page.all("th"))
    assert len(page.all("h1")) == 1
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_every_string_is_escaped(make_run, tmp_path):
    evil = '"><script>alert(1)</script>{{ 7 * 7 }}$x_1$'
    runs = [
        make_run(
            mixer,
            0,
            loss,
            recipe=evil,
            command=evil,
            commit=evil,
            device=evil,
            run_id=evil,
            config={"data": {"source": evil}},
        )
        for mixer, loss in (("softmax", 2.0), (evil, 2.1), ("_hidden", 2.2))
    ]
    page = written(runs, tmp_path, title=evil)
    assert page.all("script") == []
    assert "<script>alert(1)</script>{{ 7 * 7 }}" in page.text
    assert "<script" not in (tmp_path / "table.md").read_text(encoding="utf-8")


def test_no_runs(tmp_path):
    page = written([], tmp_path)
    assert "There are no runs to report on" in page.text
    assert not (tmp_path / "figures").exists()


def test_one_run_has_curves_and_no_verdict(make_run, tmp_path):
    page = written([make_run("softmax", 0, 2.0)], tmp_path)
    assert len(page.all("img")) == 2
    assert "No gap could be tested for noise" in page.text


def test_unfinished_runs_and_runs_without_curves(make_run, tmp_path):
    runs = [
        make_run("softmax", 0, 2.0, curve=[], loss_by_position=[]),
        make_run("cubit", 0, None, status="failed", steps=17, train_seconds=math.nan, curve=[]),
        make_run("cubit", 1, 2.2, status="interrupted", steps=60),
        make_run("tiny", 0, None, recipe="other", status="failed", parameters=0, peak_memory_bytes=0),
    ]
    page = written(runs, tmp_path)
    assert "cubit , failed, interrupted : no run finished." in page.text
    assert "17 of 200" in page.text
    assert "60 of 200" in page.text
    assert page.all("img") == []


def test_two_recipes_have_sections_and_figures_of_their_own(make_run, three_mixers, tmp_path):
    page = written([*three_mixers, make_run("softmax", 0, 3.0, recipe="other")], tmp_path)
    assert len(page.all("h2")) == 3
    assert {path.name for path in (tmp_path / "figures").iterdir()} == {
        "1-gap.png", "1-loss.png", "1-position.png", "2-loss.png", "2-position.png"
    }  # fmt: skip


def test_the_same_runs_give_the_same_page(three_mixers, tmp_path):
    first, second = (write_report(three_mixers, tmp_path / name).read_bytes() for name in ("a", "b"))
    assert first == second


def test_figures_carry_their_numbers(three_mixers):
    before = plt.get_fignums()
    gap, loss, position = group_figures(group_runs(three_mixers)[0])
    assert gap.data[0] == ("cubit", "-0.0200", "-0.0225 to -0.0175", "better")
    assert loss.data[0] == ("softmax", "50", "2.9200", "0.0115")  # 2.12 + 40 / 50
    assert position.data[:2] == [("softmax", "0 to 0", "3.1200", "0.0115"), ("softmax", "1 to 2", "2.6200", "0.0115")]
    assert loss.render(LIGHT, "png")[:4] == b"\x89PNG"
    assert plt.get_fignums() == before


def test_mixers_keep_their_look_and_are_told_apart():
    for theme in (LIGHT, DARK):
        looks = [(line.color, line.marker) for name in COLORS if (line := line_for(name, theme))]
        assert len(set(looks)) == len(COLORS)
    assert line_for("unheard-of", LIGHT) == line_for("unheard-of", LIGHT)
    assert line_for("cubit", LIGHT).dash != line_for("cubit", LIGHT, 1).dash


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_lines_stand_out_from_their_paper(theme):
    def luminance(color):
        parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    paper = luminance(theme.paper)
    for name in COLORS:
        light, dark = sorted([luminance(line_for(name, theme).color), paper], reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 3, name  # WCAG 2.1, 1.4.11


def test_missing_matplotlib_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ModuleNotFoundError, match=r"need matplotlib.*pip install 'mercer\[plots\]'"):
        pyplot()
