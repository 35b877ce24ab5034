"""DeepConvLSTM for human activity recognition (Ordóñez and Roggen 2016, section 2.3)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from archipel.models.seeding import seeded

if TYPE_CHECKING:
    from torch import nn


def deep_conv_lstm(
    seed: int,
    channels: int = 6,
    classes: int = 6,
    filters: int = 64,
    hidden: int = 128,
    convolutions: int = 4,
    layers: int = 2,
    dropout: float = 0.5,
) -> nn.Module:
    """A new network: windows of sensors float32 [batch, channels, length] -> logits float32 [batch, classes].

    With the arguments as they are it has 458,054 parameters. Convolutions along time, the same for every sensor, give
    features of short motions, and LSTM layers follow how these change; the last state decides. A window must have more
    than 4 * `convolutions` samples.

    Arguments:
        seed: determines the first parameters.
        channels: sensors, such as the three axes of an accelerometer and of a gyroscope.
        classes: the number of logits.
        filters: of each convolution.
        hidden: the size of an LSTM layer's state.
        convolutions: layers of 5 samples each, without padding.
        layers: LSTM layers. One is mostly as good as the paper's two (Bock et al. 2021).
        dropout: the share of values in front of the LSTM layers that training sets to 0.

    Raises MissingExtraError without PyTorch.

    Example:
        model = Model.from_torch(deep_conv_lstm(0, hidden=32), torch.zeros(2, 6, 128))
    """
    with seeded(seed):
        from torch import nn

        class DeepConvLSTM(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                kernels = (nn.Conv2d(filters if i else 1, filters, (1, 5)) for i in range(convolutions))
                self.convolutions = nn.ModuleList(kernels)
                self.relu = nn.ReLU()
                self.dropout = nn.Dropout(dropout)
                self.recurrent = nn.LSTM(
                    channels * filters, hidden, layers, batch_first=True, dropout=dropout if layers > 1 else 0.0
                )
                self.output = nn.Linear(hidden, classes)
                for name, parameter in self.named_parameters():
                    # Section 2.4: orthogonal first weights.
                    if parameter.dim() > 1:
                        nn.init.orthogonal_(parameter)
                    elif name.endswith("bias"):
                        nn.init.zeros_(parameter)

            def forward(self, x: Any) -> Any:
                x = x.unsqueeze(1)
                for convolution in self.convolutions:
                    x = self.relu(convolution(x))
                # [batch, filters, channels, time] -> [batch, time, filters * channels]
                states, _ = self.recurrent(self.dropout(x.permute(0, 3, 1, 2).flatten(2)))
                return self.output(states[:, -1])

        network: nn.Module = DeepConvLSTM()
    return network
