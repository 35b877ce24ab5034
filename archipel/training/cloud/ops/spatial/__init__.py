"""Operators on spatial axes: windows, padding, images."""

from archipel.training.cloud.ops.spatial import conv as conv
from archipel.training.cloud.ops.spatial import image as image
from archipel.training.cloud.ops.spatial import pad as pad
from archipel.training.cloud.ops.spatial import pooling as pooling
from archipel.training.cloud.ops.spatial import regions as regions
from archipel.training.cloud.ops.spatial import resize as resize
