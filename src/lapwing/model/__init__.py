"""A module and its batches as pure functions: parameters, selection, the tape, Jacobian rows."""

from lapwing.model.batches import Batch, Batches
from lapwing.model.calls import batch_size, take, tensors_in, unwrap
from lapwing.model.linearization import BlockRows, Digest, Linearization
from lapwing.model.network import Network, last_layer
from lapwing.model.params import (
    Params,
    Subnetwork,
    choose_weights,
    explicit_subnetwork,
    explicit_weights,
    select_names,
    subnetwork,
)
from lapwing.model.tape import Block, Plan, PlanChanged, RecordedPass, dynamic_plan

__all__ = [
    "Batch", "Batches", "Block", "BlockRows", "Digest", "Linearization", "Network", "Params", "Plan", "PlanChanged",
    "RecordedPass", "Subnetwork", "batch_size", "choose_weights", "dynamic_plan", "explicit_subnetwork",
    "explicit_weights", "last_layer", "select_names", "subnetwork", "take", "tensors_in", "unwrap",
]  # fmt: skip
