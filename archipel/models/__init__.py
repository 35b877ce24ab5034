"""Small reference networks, one file each. The functions import PyTorch, and raise MissingExtraError without it.

Every function takes a `seed`, from which all of the network's first parameters follow, and returns a new
`torch.nn.Module` with float32 parameters.
"""

from __future__ import annotations

from archipel.models.autoencoder import autoencoder
from archipel.models.char_rnn import char_rnn
from archipel.models.cnn_1d import cnn_1d
from archipel.models.digits_cnn import digits_cnn
from archipel.models.ds_cnn import ds_cnn
from archipel.models.fedavg_cnn import fedavg_cnn
from archipel.models.lenet import lenet
from archipel.models.mlp import mlp
from archipel.models.mobilenet_v2 import mobilenet_v2
from archipel.models.resnet8 import resnet8
from archipel.models.transformer import transformer
from archipel.models.unet import unet

__all__ = [
    "autoencoder",
    "char_rnn",
    "cnn_1d",
    "digits_cnn",
    "ds_cnn",
    "fedavg_cnn",
    "lenet",
    "mlp",
    "mobilenet_v2",
    "resnet8",
    "transformer",
    "unet",
]
