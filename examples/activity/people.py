"""Who is who, and which of a person's windows are there to learn from and which to measure on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from archipel.datasets import HarByPerson
from archipel.datasets.splits import seeded_order
from archipel.errors import CommandError


@dataclass(frozen=True)
class Groups:
    """volunteers    whose windows the cloud has: a few of the contributors, drawn by the seed
    contributors  whose phones take part in the rounds: the people for training of the published split
    newcomers     whose phones never do: its people for testing
    """

    volunteers: tuple[int, ...]
    contributors: tuple[int, ...]
    newcomers: tuple[int, ...]

    @property
    def everybody(self) -> tuple[int, ...]:
        return tuple(sorted((*self.contributors, *self.newcomers)))

    def of(self, person: int) -> str:
        if person in self.newcomers:
            return "newcomer"
        return "volunteer" if person in self.volunteers else "contributor"


def draw_groups(windows: HarByPerson, volunteers: int, seed: int) -> Groups:
    """Raises CommandError for more volunteers than people for training, or fewer than two."""
    contributors = windows.train_people
    if not 2 <= volunteers <= len(contributors):
        raise CommandError(f"volunteers: expected 2..{len(contributors)}, got {volunteers}")
    drawn = seeded_order(contributors, f"volunteers {seed}")[:volunteers]
    return Groups(tuple(drawn), contributors, windows.test_people)


def earlier_and_later(windows: HarByPerson) -> tuple[HarByPerson, HarByPerson]:
    """What to learn from, and what to measure on: the last bout of each activity in each recording of each person.

    Neighbouring windows share half of their samples; those of two bouts share none, and other activities lie between.
    """
    places = np.stack([windows.recordings, windows.labels], axis=1)
    later = np.zeros(len(windows), bool)
    for place in np.unique(places, axis=0):
        own = np.all(places == place, axis=1)
        later |= own & (windows.bouts == windows.bouts[own].max())
    return windows.take(~later), windows.take(later)


def lab(windows: HarByPerson, volunteer: int) -> HarByPerson:
    """What the cloud gets of a volunteer: the earlier bouts of the first recording, the phone fixed to the belt."""
    earlier = earlier_and_later(windows.take(windows.people == volunteer))[0]
    return earlier.take(earlier.recordings == earlier.recordings.min())
