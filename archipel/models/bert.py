"""An encoder of the BERT family (Devlin et al. 2019, section 3), alone or with a head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from archipel.models.attention import attend
from archipel.models.seeding import seeded

if TYPE_CHECKING:
    from torch import nn

Head = Literal["none", "classification", "masked_tokens"]


def bert(
    seed: int,
    head: Head = "none",
    classes: int = 2,
    vocabulary: int = 30522,
    length: int = 512,
    width: int = 768,
    heads: int = 12,
    layers: int = 12,
    token_types: int = 2,
    dropout: float = 0.1,
) -> nn.Module:
    """A new network: `tokens`, `mask` and `token_types`, each int64 [batch, time <= length] -> float32, see `head`.

    With the arguments as they are it is BERT-base, of 109,482,240 parameters. Every position attends to all those whose
    `mask` is 1; 0 marks what fills a sequence up. `token_types` tells two texts in one sequence apart.

    Arguments:
        seed: determines the first parameters.
        head: "none" gives [batch, time, width] and the pooled first position [batch, width]; "classification" gives
            logits [batch, classes]; "masked_tokens" gives logits [batch, time, vocabulary], of which the loss counts
            those of hidden tokens (`losses.cross_entropy(axis=-1, ignore_index=-100)`).
        classes: the number of logits of "classification".
        vocabulary: the number of different tokens.
        length: the most tokens in a sequence.
        width: the size of a token's representation, a multiple of `heads`.
        heads: attention heads in each layer.
        layers: the number of layers.
        token_types: how many texts there may be in a sequence.
        dropout: the share of values that training sets to 0: of embeddings, attention, what a layer adds, and in
            front of the logits of "classification".

    Raises MissingExtraError without PyTorch, ValueError for another head or where `heads` does not divide `width`.

    Example:
        network = bert(0, "classification", vocabulary=1000, width=64, heads=4, layers=2)
        tokens = torch.ones(2, 16, dtype=torch.int64)
        model = Model.from_torch(network, (tokens, torch.ones_like(tokens), torch.zeros_like(tokens)))
    """
    if head not in ("none", "classification", "masked_tokens"):
        raise ValueError(f"head must be 'none', 'classification' or 'masked_tokens', is {head!r}")
    if width % heads:
        raise ValueError(f"width must be a multiple of heads, is {width} with {heads} heads")
    kinds = token_types
    with seeded(seed):
        import torch
        from torch import nn
        from torch.nn import functional

        def norm() -> nn.Module:
            return nn.LayerNorm(width, eps=1e-12)

        class Layer(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
                self.project, self.norm1 = nn.Linear(width, width), norm()
                self.widen, self.narrow, self.norm2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), norm()
                self.dropout = nn.Dropout(dropout)

            def forward(self, x: Any, hidden: Any) -> Any:
                batch, time, _ = x.shape

                def split(y: Any) -> Any:
                    return y.reshape(batch, time, heads, width // heads).transpose(1, 2)

                q, k, v = split(self.query(x)), split(self.key(x)), split(self.value(x))
                mixed = attend(q, k, v, self.dropout, added=hidden)
                # Normalization comes after the sum, as in Vaswani et al. 2017.
                x = self.norm1(x + self.dropout(self.project(mixed.transpose(1, 2).reshape(batch, time, width))))
                return self.norm2(x + self.dropout(self.narrow(functional.gelu(self.widen(x)))))

        class BERT(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.tokens, self.types = nn.Embedding(vocabulary, width), nn.Embedding(kinds, width)
                self.positions = nn.Parameter(torch.empty(length, width))
                self.norm, self.dropout = norm(), nn.Dropout(dropout)
                self.layers = nn.ModuleList(Layer() for _ in range(layers))
                if head == "masked_tokens":
                    self.transform, self.transform_norm = nn.Linear(width, width), norm()
                    self.bias = nn.Parameter(torch.zeros(vocabulary))
                else:
                    self.pool = nn.Linear(width, width)
                if head == "classification":
                    self.output = nn.Linear(width, classes)
                for name, parameter in self.named_parameters():
                    if parameter.dim() > 1:  # as the paper's own code: normal with 0.02, cut off at two deviations
                        nn.init.trunc_normal_(parameter, std=0.02, a=-0.04, b=0.04)
                    elif name.endswith("bias"):
                        nn.init.zeros_(parameter)

            def forward(self, tokens: Any, mask: Any, token_types: Any) -> Any:
                x = self.tokens(tokens) + self.types(token_types) + self.positions[: tokens.shape[1]]
                x = self.dropout(self.norm(x))
                # -10,000 as in the paper's own code, not -inf: a sequence without any token gives no NaN.
                hidden = (mask == 0).to(x.dtype)[:, None, None, :] * -1e4
                for layer in self.layers:
                    x = layer(x, hidden)
                if head == "masked_tokens":
                    x = self.transform_norm(functional.gelu(self.transform(x)))
                    return functional.linear(x, self.tokens.weight, self.bias)  # the matrix of the embedding again
                pooled = torch.tanh(self.pool(x[:, 0]))
                return (x, pooled) if head == "none" else self.output(self.dropout(pooled))

        network: nn.Module = BERT()
    return network
