"""Insight into models and training runs: pages that show graphs, times, memory, weights and curves.

Its files are imported when they are needed, so that who needs one of them does not wait for all.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from archipel.insight.comparing import compare_subjects as compare_subjects
    from archipel.insight.page import policy as policy
    from archipel.insight.page import render as render
    from archipel.insight.page_data import Page as Page
    from archipel.insight.page_data import Subject as Subject
    from archipel.insight.runs import Run as Run
    from archipel.insight.runs import is_run as is_run
    from archipel.insight.runs import read_run as read_run
    from archipel.insight.serving import PageServer as PageServer
    from archipel.insight.subjects import OpenSubject as OpenSubject
    from archipel.insight.subjects import read_bundle as read_bundle
    from archipel.insight.subjects import read_onnx as read_onnx
    from archipel.insight.times import measure_times as measure_times
    from archipel.insight.versions import activation_histograms as activation_histograms
    from archipel.insight.versions import read_versions as read_versions
    from archipel.insight.versions import weight_histograms as weight_histograms

_HOMES = {
    "OpenSubject": "subjects", "Page": "page_data", "PageServer": "serving", "Run": "runs", "Subject": "page_data",
    "activation_histograms": "versions", "compare_subjects": "comparing", "is_run": "runs", "measure_times": "times",
    "policy": "page", "read_bundle": "subjects", "read_onnx": "subjects", "read_run": "runs",
    "read_versions": "versions", "render": "page", "weight_histograms": "versions",
}  # fmt: skip
__all__ = [
    "OpenSubject",
    "Page",
    "PageServer",
    "Run",
    "Subject",
    "activation_histograms",
    "compare_subjects",
    "is_run",
    "measure_times",
    "policy",
    "read_bundle",
    "read_onnx",
    "read_run",
    "read_versions",
    "render",
    "weight_histograms",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"archipel.insight.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'archipel.insight' has no attribute {name!r}")
