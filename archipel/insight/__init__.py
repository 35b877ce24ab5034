"""Insight into models and training runs: pages that show graphs, times, memory, weights and curves."""

from archipel.insight.comparing import compare_subjects
from archipel.insight.page import policy, render
from archipel.insight.page_data import Page, Subject
from archipel.insight.runs import Run, is_run, read_run
from archipel.insight.serving import PageServer
from archipel.insight.subjects import OpenSubject, read_bundle, read_onnx
from archipel.insight.times import measure_times
from archipel.insight.versions import activation_histograms, read_versions, weight_histograms

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
