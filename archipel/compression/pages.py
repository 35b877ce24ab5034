"""Write HTML pages that need nothing else. Needs jinja2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2

from archipel.durable import write_durably

_BASE = jinja2.PackageLoader("archipel.compression", "templates")


def write_page(path: Path, template: str, package: str = "archipel.compression", **context: Any) -> None:
    """Write a page, whole or not at all. Raises OSError.

    Arguments:
        path: the file.
        template: a file in the folder `templates` of the package. It may extend page.html, which the package of this
            file has.
        package: the dotted name of the package.
        context: what the template shows; page.html needs `title`. Text is escaped.
    """
    environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader([jinja2.PackageLoader(package, "templates"), _BASE]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    write_durably(path, environment.get_template(template).render(**context).encode(), 0o666)
