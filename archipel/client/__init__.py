"""The device agent: enrols, checks in, trains on local data, takes part in secure rounds."""

from archipel.client.agent import Agent
from archipel.client.config import AgentConfig
from archipel.client.events import Event, Outcome
from archipel.client.journal import Entry

__all__ = ["Agent", "AgentConfig", "Entry", "Event", "Outcome"]
