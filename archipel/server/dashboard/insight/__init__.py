"""What the dashboard shows of the inside of models: documents that a process of their own makes of stored bundles."""

from archipel.server.dashboard.insight.documents import DOCUMENTS, Documents, Problem, Ready, Wanted
from archipel.server.dashboard.insight.reading import Model, find_document

__all__ = ["DOCUMENTS", "Documents", "Model", "Problem", "Ready", "Wanted", "find_document"]
