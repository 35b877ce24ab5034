"""The operator's Python API: typed calls to a server over HTTP."""

from archipel.operator.client import OperatorClient
from archipel.protocol.operator.tasks import TaskRequest

__all__ = ["OperatorClient", "TaskRequest"]
