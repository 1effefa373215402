"""Matrices and rows of Jacobians. Knows no network and no data."""

from lapwing.linalg.blockdiagonal import BlockDiagonal
from lapwing.linalg.dense import Dense
from lapwing.linalg.eigenkronecker import EigenKronecker, SimultaneousKronecker
from lapwing.linalg.kronecker import Kronecker
from lapwing.linalg.layout import Layout, Places
from lapwing.linalg.lowrank import LowRank
from lapwing.linalg.matrixrows import DeferredRows, Extent, FactoredRows, MatrixRows, Term
from lapwing.linalg.psd import PSD, Diagonal, unpack_sound
from lapwing.linalg.rows import DenseRows, Jacobian, Rows
from lapwing.storage import move, once, pack, unpack

__all__ = [
    "PSD",
    "BlockDiagonal",
    "DeferredRows",
    "Dense",
    "DenseRows",
    "Diagonal",
    "EigenKronecker",
    "Extent",
    "FactoredRows",
    "Jacobian",
    "Kronecker",
    "Layout",
    "LowRank",
    "MatrixRows",
    "Places",
    "Rows",
    "SimultaneousKronecker",
    "Term",
    "move",
    "once",
    "pack",
    "unpack",
    "unpack_sound",
]
