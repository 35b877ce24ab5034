"""Preprocessing as graphs: transforms that go in front of a model, and with it into the signed bundle."""

from archipel.graph import requirement as requirement  # isort: skip  (first: it names the missing extra)
from archipel.preprocessing.assembling import chain as chain
from archipel.preprocessing.assembling import put_before as put_before
from archipel.preprocessing.augmentation import RandomFlip as RandomFlip
from archipel.preprocessing.augmentation import RandomGain as RandomGain
from archipel.preprocessing.augmentation import RandomMask as RandomMask
from archipel.preprocessing.augmentation import RandomNoise as RandomNoise
from archipel.preprocessing.augmentation import RandomShift as RandomShift
from archipel.preprocessing.description import describe as describe
from archipel.preprocessing.description import to_settings as to_settings
from archipel.preprocessing.fitting import fitted as fitted
from archipel.preprocessing.layout import Layout as Layout
from archipel.preprocessing.numbers import Average as Average
from archipel.preprocessing.numbers import Cast as Cast
from archipel.preprocessing.numbers import Clip as Clip
from archipel.preprocessing.numbers import Normalize as Normalize
from archipel.preprocessing.numbers import OneHot as OneHot
from archipel.preprocessing.numbers import Scale as Scale
from archipel.preprocessing.numbers import Standardize as Standardize
from archipel.preprocessing.pictures import CropOrPad as CropOrPad
from archipel.preprocessing.pictures import Greyscale as Greyscale
from archipel.preprocessing.raw import Raw as Raw
from archipel.preprocessing.resize import Resize as Resize
from archipel.preprocessing.resize import ResizeShorter as ResizeShorter
from archipel.preprocessing.settings import TRANSFORMS as TRANSFORMS
from archipel.preprocessing.settings import from_settings as from_settings
from archipel.preprocessing.settings import load_settings as load_settings
from archipel.preprocessing.sound import LogMel as LogMel
from archipel.preprocessing.sound import Mfcc as Mfcc
from archipel.preprocessing.sound import Preemphasis as Preemphasis
from archipel.preprocessing.sound import Spectrogram as Spectrogram
from archipel.preprocessing.transform import Transform as Transform
from archipel.preprocessing.windows import Frames as Frames

__all__ = [
    "TRANSFORMS",
    "Average",
    "Cast",
    "Clip",
    "CropOrPad",
    "Frames",
    "Greyscale",
    "Layout",
    "LogMel",
    "Mfcc",
    "Normalize",
    "OneHot",
    "Preemphasis",
    "RandomFlip",
    "RandomGain",
    "RandomMask",
    "RandomNoise",
    "RandomShift",
    "Raw",
    "Resize",
    "ResizeShorter",
    "Scale",
    "Spectrogram",
    "Standardize",
    "Transform",
    "chain",
    "describe",
    "fitted",
    "from_settings",
    "load_settings",
    "put_before",
    "to_settings",
]
