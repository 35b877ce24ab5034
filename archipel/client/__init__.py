"""The device agent: enrols, checks in, trains on local data, takes part in secure rounds."""

from archipel.client.agent import Agent
from archipel.client.conditions import Conditions, ConditionSettings, Probe
from archipel.client.config import AgentConfig
from archipel.client.entry import Entry
from archipel.client.erasing import erase
from archipel.client.events import Event, Outcome
from archipel.client.keystore import FileKeys, KeyStore, data_key
from archipel.client.pause import pause, paused, resume

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
