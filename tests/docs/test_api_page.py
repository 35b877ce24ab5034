"""docs/api.md is what the declarations say."""

from __future__ import annotations

import importlib.util

from tests.support.pages import ROOT


def test_the_page_is_the_present_one() -> None:
    spec = importlib.util.spec_from_file_location("api_page", ROOT / "scripts" / "api_page.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.PAGE.read_text(encoding="utf-8") == module.page(), "run python scripts/api_page.py"
