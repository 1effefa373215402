"""Matrices and rows of Jacobians. Knows no network and no data."""

from lapwing.linalg.blocks import BlockDiagonal, Jacobian, Layout, Places
from lapwing.linalg.dense import Dense
from lapwing.linalg.kronecker import EigenKronecker, Kronecker, SimultaneousKronecker
from lapwing.linalg.lowrank import LowRank
from lapwing.linalg.psd import PSD, Diagonal, unpack_sound
from lapwing.linalg.rows import DeferredRows, DenseRows, Extent, FactoredRows, MatrixRows, Rows, Term
from lapwing.storage import move, once, pack, unpack

__all__ = [
    "PSD", "BlockDiagonal", "DeferredRows", "Dense", "DenseRows", "Diagonal", "EigenKronecker", "Extent",
    "FactoredRows", "Jacobian", "Kronecker", "Layout", "LowRank", "MatrixRows", "Places", "Rows",
    "SimultaneousKronecker", "Term", "move", "once", "pack", "unpack", "unpack_sound",
]  # fmt: skip
