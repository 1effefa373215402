"""Laws as test cases: subclass one for a class of your own, and pytest checks it like the ones in the library."""

from lapwing.testing.likelihoods import LikelihoodLaws
from lapwing.testing.matrices import MatrixLaws
from lapwing.testing.rules import RuleLaws
from lapwing.testing.structures import StructureLaws

__all__ = ["LikelihoodLaws", "MatrixLaws", "RuleLaws", "StructureLaws"]
