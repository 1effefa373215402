"""Laws as test cases: subclass one for a class of your own, and pytest checks it like the ones in the library."""

from lapwing.testing.rules import RuleLaws

__all__ = ["RuleLaws"]
