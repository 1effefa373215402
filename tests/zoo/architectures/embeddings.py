"""Embeddings and everything that starts from indices."""

import torch
import torch.nn.functional as F
from torch import nn

from .registry import Net, add, architecture, ints, lengths, named, several, weight

add("embedding_one_index", lambda: nn.Sequential(nn.Embedding(5, 3), nn.Tanh(), nn.Linear(3, 2)), ints(5), once=True)
add(
    "embedding_flattened",
    lambda: nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Tanh(), nn.Linear(9, 2)),
    ints(5, 3),
)
add(
    "embedding_padding_idx",
    lambda: nn.Sequential(nn.Embedding(5, 3, padding_idx=1), nn.Flatten(), nn.Linear(9, 2)),
    ints(3, 3),
)
add(
    "embedding_negative_padding_idx",
    lambda: nn.Sequential(nn.Embedding(3, 3, padding_idx=-1), nn.Flatten(), nn.Linear(9, 2)),
    ints(3, 3),
)
add("embedding_tokens", lambda: nn.Sequential(nn.Embedding(5, 3), nn.Tanh(), nn.Linear(3, 2)), ints(5, 3), "tokens")
add(
    "embedding_sparse",
    lambda: nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Flatten(), nn.Linear(9, 2)),
    ints(5, 3),
    refusal=True,
)


@architecture(ints(5, 3))
def embedding_mean_pooling():
    return Net(lambda s, i: s.head(torch.tanh(s.embed(i).mean(1))), embed=nn.Embedding(5, 3), head=nn.Linear(3, 2))


for _mode in ("sum", "mean", "max"):
    add(
        f"embedding_bag_{_mode}",
        lambda mode=_mode: nn.Sequential(nn.EmbeddingBag(5, 3, mode=mode), nn.Tanh(), nn.Linear(3, 2)),
        ints(5, 3),
    )
add(
    "embedding_bag_padding_idx",
    lambda: nn.Sequential(nn.EmbeddingBag(4, 3, mode="mean", padding_idx=0), nn.Linear(3, 2)),
    ints(4, 3),
)


@architecture(several(ints(5, 3), lambda n: torch.rand(n, 3, dtype=torch.float64)))
def embedding_bag_weighted():
    def call(s, i, w):
        return s.head(s.bag(i, per_sample_weights=w))

    return Net(call, bag=nn.EmbeddingBag(5, 3, mode="sum"), head=nn.Linear(3, 2))


@architecture(ints(5, 3))
def embedding_bag_offsets():
    """The batch flattened with offsets."""

    def call(s, i):
        return s.head(torch.tanh(s.bag(i.reshape(-1), torch.arange(0, i.numel(), i.shape[1]))))

    return Net(call, bag=nn.EmbeddingBag(5, 3, mode="sum"), head=nn.Linear(3, 2))


@architecture(named(tokens=ints(5, 3), lengths=lengths(1, 3)))
def embedding_masked_mean_dict():
    """Dict inputs; the mean runs over the real tokens only."""

    def call(s, tokens, lengths):
        mask = (torch.arange(tokens.shape[1]) < lengths[:, None]).double()
        h = (s.embed(tokens) * mask[..., None]).sum(1) / lengths[:, None]
        return s.head(torch.tanh(h))

    return Net(call, embed=nn.Embedding(5, 3), head=nn.Linear(3, 2))


@architecture(ints(4, 3))
def embedding_positions():
    """Positions from arange and from a table; types broadcast."""

    def call(s, i):
        h = s.embed(i) + s.position(torch.arange(3)) + s.kind(torch.zeros_like(i)) + s.raw[: i.shape[1]]
        return s.head(torch.tanh(h).flatten(1))

    return Net(
        call,
        embed=nn.Embedding(4, 2),
        position=nn.Embedding(3, 2),
        kind=nn.Embedding(2, 2),
        raw=weight(5, 2),
        head=nn.Linear(6, 2),
    )


@architecture(several(ints(4), ints(3)))
def factorization_machine():
    """User and item embeddings, their inner product, biases read from embeddings of width one; output (B,)-like."""

    def call(s, u, i):
        dot = (s.user(u) * s.item(i)).sum(-1, keepdim=True)
        return torch.cat([dot + s.bu(u), dot * s.bi(i) + s.offset], -1)

    return Net(
        call,
        user=nn.Embedding(4, 3),
        item=nn.Embedding(3, 3),
        bu=nn.Embedding(4, 1),
        bi=nn.Embedding(3, 1),
        offset=weight(1),
    )


@architecture(ints(5, 3), "tokens")
def embedding_tied_head():
    return Net(
        lambda s, i: F.linear(torch.tanh(s.fc(s.embed(i))), s.embed.weight, s.bias),
        embed=nn.Embedding(5, 3),
        fc=nn.Linear(3, 3),
        bias=weight(5),
    )


@architecture(ints(5, 3))
def embedding_tied_module_head():
    """`head.weight = embed.weight`, the way language models do it."""
    embed, head = nn.Embedding(5, 3, padding_idx=0), nn.Linear(3, 5, bias=False)
    head.weight = embed.weight
    return Net(lambda s, i: s.head(torch.tanh(s.embed(i)).mean(1)), embed=embed, head=head)


@architecture(ints(4, 2))
def one_hot_linear():
    return Net(
        lambda s, i: s.head(torch.tanh(F.one_hot(i, 4).double().flatten(1) @ s.w)), w=weight(8, 3), head=nn.Linear(3, 2)
    )
