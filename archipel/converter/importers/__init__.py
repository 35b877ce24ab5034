"""From other frameworks to Model. Importing this package registers the importers, and loads none of the frameworks."""

from archipel.converter.importers import sklearn as sklearn
from archipel.converter.importers import torch as torch
