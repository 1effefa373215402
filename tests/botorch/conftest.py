"""BoTorch is imported first through the door, which keeps the warnings of its import to itself."""

import lapwing.botorch  # noqa: F401
