"""What depends on the version of a library and cannot be told from what the library has."""

import torch
from torch.torch_version import TorchVersion


# In 2.11 FSDP2 lets parameters that are no floating point numbers want gradients, which fails, and would cast them.
FSDP2_SPLITS_BYTES = TorchVersion(torch.__version__) >= "2.13"
