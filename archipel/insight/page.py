"""One HTML file that shows a `Page`: with its scripts and styles in it, and a policy that lets it load nothing else.

What comes from a model is in one block of JSON. In it no `<` is left, so no name can end the block; the scripts put
texts in as text. The policy names the scripts and styles by their SHA-256, so that nothing else would run.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from pathlib import Path

import jinja2
import msgspec
from markupsafe import Markup

from archipel.errors import InsightError
from archipel.insight.limits import MAX_PAGE_BYTES
from archipel.insight.page_data import Page
from archipel.insight_page import scripts, styles

_FOLDER = Path(__file__).parent
_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def render(page: Page) -> str:
    """The page as HTML. Raises InsightError for one larger than MAX_PAGE_BYTES.

    Example:
        opened = read_onnx("model.onnx")
        Path("model.html").write_text(render(Page(title="model", version="1", subjects=[opened.subject])))
    """
    data = escape(msgspec.json.encode(page).decode())
    if len(data) > MAX_PAGE_BYTES:
        raise InsightError(
            f"the page would have {len(data):,} bytes, more than {MAX_PAGE_BYTES:,}; show one program alone (--program)"
        )
    return _template().render(
        title=page.title,
        data=Markup(data),
        scripts=[Markup(text) for text in scripts()],
        styles=[Markup(text) for text in styles()],
        policy=policy(),
    )


@cache
def policy() -> str:
    """The Content-Security-Policy of every page.

    Example:
        headers = {"Content-Security-Policy": policy()}
    """
    own_scripts, own_styles = (
        " ".join(f"'sha256-{_digest(text)}'" for text in texts) for texts in (scripts(), styles())
    )
    return "; ".join(
        ("default-src 'none'", f"script-src {own_scripts}", f"style-src {own_styles}", "img-src data:",
         "base-uri 'none'", "form-action 'none'")
    )  # fmt: skip


def escape(json: str) -> str:
    """JSON that means the same and cannot end the block of HTML that it lies in."""
    for character, code in _ESCAPES.items():
        json = json.replace(character, code)
    return json


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER / "templates"), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    return environment.get_template("insight.html")


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
