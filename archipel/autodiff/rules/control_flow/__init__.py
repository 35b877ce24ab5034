"""Gradient rules of If, Scan and Loop. Nothing is unrolled: the gradient of a loop is a loop."""

from archipel.autodiff.rules.control_flow import branch as branch
from archipel.autodiff.rules.control_flow import loop as loop
from archipel.autodiff.rules.control_flow import scan as scan
