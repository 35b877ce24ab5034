"""The device agent: it enrols, checks in, trains on local data and takes part in secure rounds."""

from archipel.client.agent import Agent
from archipel.client.conditions.conditions import Conditions, ConditionSettings, Probe
from archipel.client.conditions.pause import pause, paused, resume
from archipel.client.config import AgentConfig
from archipel.client.events import Event, Outcome
from archipel.client.memory.entry import Entry
from archipel.client.memory.erasing import erase
from archipel.client.memory.keystore import FileKeys, KeyStore, data_key

__all__ = [
    "Agent",
    "AgentConfig",
    "ConditionSettings",
    "Conditions",
    "Entry",
    "Event",
    "FileKeys",
    "KeyStore",
    "Outcome",
    "Probe",
    "data_key",
    "erase",
    "pause",
    "paused",
    "resume",
]
