"""What all pages share: how templates are found, and how a figure is given to one."""

import base64
from importlib import resources
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined

from mercer.report.figures import Figure
from mercer.report.style import DARK, LIGHT


def render_page(template: str, **values: Any) -> str:
    """Fill in a template, named by its path in this package; every string is escaped."""
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        loader=FunctionLoader(lambda name: (resources.files("mercer") / name).read_text(encoding="utf-8")),
    )
    return environment.get_template(template).render(**values)


def shown(figure: Figure) -> dict[str, Any]:
    """Return what report/figure.html shows: the drawing, light and dark, and its numbers."""
    return {
        "name": figure.name,
        "title": figure.title,
        "alt": figure.alt,
        "caption": figure.caption,
        "header": figure.header,
        "data": figure.data,
        "light": _data_uri(figure.render(LIGHT, "svg")),
        "dark": _data_uri(figure.render(DARK, "svg")),
    }


def _data_uri(svg: bytes) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(svg).decode("ascii")
