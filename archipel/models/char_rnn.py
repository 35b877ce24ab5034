"""Next-character models: an embedding, LSTM or GRU layers, and a decoder (LEAF, Caldas et al. 2018, appendix A)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from archipel.models.seeding import seeded

if TYPE_CHECKING:
    from torch import nn


def char_rnn(
    seed: int,
    cell: Literal["lstm", "gru"] = "lstm",
    vocabulary: int = 80,
    embedding: int = 8,
    hidden: int = 256,
    layers: int = 2,
) -> nn.Module:
    """A new network (LSTM: 819,920 parameters): int64 [batch, time] -> logits float32 [batch, time, vocabulary].

    The logits at position t predict character t + 1.

    Arguments:
        seed: determines the first parameters.
        cell: the kind of the recurrent layers.
        vocabulary: the number of different characters.
        embedding: the size of a character's embedding.
        hidden: the size of a recurrent layer's state.
        layers: the number of recurrent layers.

    Raises MissingExtraError without PyTorch.

    Example:
        network = char_rnn(0, cell="gru", hidden=64)
        model = Model.from_torch(network, torch.zeros(2, 20, dtype=torch.int64))
    """
    with seeded(seed):
        from torch import nn

        class CharRNN(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                kind = {"lstm": nn.LSTM, "gru": nn.GRU}[cell]
                self.embedding = nn.Embedding(vocabulary, embedding)
                self.recurrent = kind(embedding, hidden, num_layers=layers, batch_first=True)
                self.decoder = nn.Linear(hidden, vocabulary)

            def forward(self, characters: Any) -> Any:
                states, _ = self.recurrent(self.embedding(characters))
                return self.decoder(states)

        network: nn.Module = CharRNN()
    return network
