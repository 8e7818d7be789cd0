"""The torch backend."""

from openlm_moe_kernels.reference import *  # noqa: F403
from openlm_moe_kernels.reference import unsupported  # noqa: F401
