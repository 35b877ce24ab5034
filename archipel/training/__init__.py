"""Training as graphs: losses, optimizers, step and evaluation programs, and a reference driver."""

from archipel.graph import requirement as requirement  # isort: skip  (first: it names the missing extra)
from archipel.training import losses as losses
from archipel.training import optimizers as optimizers
from archipel.training.driver import StepRunner as StepRunner
from archipel.training.driver import run_steps as run_steps
from archipel.training.evaluation import evaluate_graph as evaluate_graph
from archipel.training.step import step_graph as step_graph

__all__ = ["StepRunner", "evaluate_graph", "losses", "optimizers", "run_steps", "step_graph"]
