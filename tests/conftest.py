"""What every test needs before torch is imported."""

import os

# One-row products in MKL depend on the weight's address alignment unless a code path is fixed.
os.environ.setdefault("MKL_CBWR", "COMPATIBLE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
