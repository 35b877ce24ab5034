"""The scripts and styles of the page that shows models: in the files of `archipel insight`, and in the dashboard."""

from archipel.insight_page.assets import script, scripts, styles

__all__ = ["script", "scripts", "styles"]
