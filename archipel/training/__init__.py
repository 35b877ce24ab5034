"""Training as graphs: losses, optimizers, step and evaluation programs, and a reference driver."""

from archipel.graph import requirement as requirement  # isort: skip  (first: it names the missing extra)
from archipel.training import losses as losses
from archipel.training import optimizers as optimizers
from archipel.training import schedules as schedules
from archipel.training import transforms as transforms
from archipel.training.driver import StepRunner as StepRunner
from archipel.training.driver import run_steps as run_steps
from archipel.training.evaluation import evaluate_graph as evaluate_graph
from archipel.training.per_example import per_example as per_example
from archipel.training.precision import mixed as mixed
from archipel.training.recompute import recompute as recompute
from archipel.training.step import step_graph as step_graph

__all__ = [
    "StepRunner",
    "evaluate_graph",
    "losses",
    "mixed",
    "optimizers",
    "per_example",
    "recompute",
    "run_steps",
    "schedules",
    "step_graph",
    "transforms",
]
