"""Small reference networks, one file each. The functions import PyTorch, and raise MissingExtraError without it.

Every function takes a `seed`, from which all of the network's first parameters follow, and returns a new
`torch.nn.Module` with float32 parameters.
"""

from __future__ import annotations

from archipel.models.autoencoder import autoencoder
from archipel.models.bc_resnet import bc_resnet
from archipel.models.bert import bert
from archipel.models.char_rnn import char_rnn
from archipel.models.cnn_1d import cnn_1d
from archipel.models.deep_conv_lstm import deep_conv_lstm
from archipel.models.digits_cnn import digits_cnn
from archipel.models.ds_cnn import ds_cnn
from archipel.models.fedavg_cnn import fedavg_cnn
from archipel.models.gpt import gpt
from archipel.models.lenet import lenet
from archipel.models.mlp import mlp
from archipel.models.mobilenet_v2 import mobilenet_v2
from archipel.models.resnet import resnet18, resnet50
from archipel.models.resnet8 import resnet8
from archipel.models.transformer import transformer
from archipel.models.unet import unet

__all__ = [
    "autoencoder",
    "bc_resnet",
    "bert",
    "char_rnn",
    "cnn_1d",
    "deep_conv_lstm",
    "digits_cnn",
    "ds_cnn",
    "fedavg_cnn",
    "gpt",
    "lenet",
    "mlp",
    "mobilenet_v2",
    "resnet8",
    "resnet18",
    "resnet50",
    "transformer",
    "unet",
]
