"""Structured pruning: removes channels from the tensors of any graph."""

from archipel.compression.prune.dependency import ChannelGroup as ChannelGroup
from archipel.compression.prune.dependency import Member as Member
from archipel.compression.prune.dependency import channel_groups as channel_groups
from archipel.compression.prune.dependency import fixed_channels as fixed_channels
from archipel.compression.prune.removal import remove_channels as remove_channels
from archipel.compression.prune.structured import PruneChannels as PruneChannels

__all__ = ["ChannelGroup", "Member", "PruneChannels", "channel_groups", "fixed_channels", "remove_channels"]
