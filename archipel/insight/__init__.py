"""Insight into models and training runs: pages that show graphs, times, memory, weights and curves."""

from archipel.insight.page import policy, render
from archipel.insight.page_data import Page, Subject
from archipel.insight.serving import PageServer
from archipel.insight.subjects import OpenSubject, read_bundle, read_onnx
from archipel.insight.times import measure_times

__all__ = [
    "OpenSubject",
    "Page",
    "PageServer",
    "Subject",
    "measure_times",
    "policy",
    "read_bundle",
    "read_onnx",
    "render",
]
