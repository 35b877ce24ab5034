"""The operator's dashboard: pages for people at /dashboard/, which ask the API as the person who is logged in."""

from archipel.server.dashboard.registering import answer_problem, register
from archipel.server.dashboard.session_store import Opening, SessionStore

__all__ = ["Opening", "SessionStore", "answer_problem", "register"]
